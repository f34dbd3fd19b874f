"""Hosts that have read a job's data in earlier runs: their node caches, or their disks, may hold it."""

from __future__ import annotations

from pathlib import Path

from wanma.data.stores.filesystems import is_remote_entry
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import list_runs
from wanma.job.sections.data import DataSection
from wanma.job.sections.job import Job
from wanma.report.rank_work import read_node_records

_NEWEST_RUNS = 10
"""Number of runs that are looked at."""
_RECORD_BYTES = 1 << 14
"""Bytes at the end of a node's record that are read: the host is in each line."""


def hosts_of_data(job: Job) -> tuple[str, ...]:
    """Return the hosts on which earlier runs of `observe.runs` have read the same data, the best first.

    Those that have read most entries of the job come first, and of these the hosts of the newest run. What
    their caches still hold is not asked. Empty for engines that ask the hosts themselves.
    """
    wanted = _entries_of_nodes(job.data)
    if not wanted or job.cluster.engine in ("local", "ssh"):
        return ()
    counts: dict[str, int] = {}
    for run in list_runs(Path(job.observe.runs))[:_NEWEST_RUNS]:
        try:
            earlier = load_recorded_job(run.job)
        except WanmaError:  # it waits, or is a script
            continue
        is_like = (earlier.cluster.engine, earlier.data.cache) == (job.cluster.engine, job.data.cache)
        if not is_like or not (count := len(wanted & _entries_of_nodes(earlier.data))):
            continue
        for _, records in sorted(read_node_records(run, _RECORD_BYTES).items()):
            if records and (host := records[-1].get("host")):
                counts[host] = max(count, counts.get(host, 0))
    return tuple(sorted(counts, key=lambda host: -counts[host]))


def _entries_of_nodes(data: DataSection) -> set[str]:
    """Return the entries that some nodes may have and others lack: in a cache, or as parts."""
    entries = {entry for _, source in data.located_sources for entry in source.entries}
    return entries if data.placement == "parts" else set(filter(is_remote_entry, entries))
