"""`wanma launch SCRIPT`: a user's own script on several ranks, under the supervisor."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from wanma.api.elastic import refuse_elastic
from wanma.api.records import events_so_far, only_one, record_end
from wanma.api.session import OWN_MODEL, SESSION, launched_cluster
from wanma.elastic.environment import worker_environment
from wanma.elastic.launch import Launch
from wanma.engines.local import run as run_local
from wanma.hardware.discover import discover
from wanma.hardware.interfaces import check_interface
from wanma.hardware.position import position_of
from wanma.job.errors import JobError, WanmaError
from wanma.job.load import job_from, parse_override
from wanma.job.observe_section import ObserveSection
from wanma.job.plan import Plan
from wanma.job.run_directory import RunDirectory
from wanma.job.sections import ClusterSection
from wanma.job.worker import Event, Worker, current_worker
from wanma.observe.console import Console, open_console

PRELOAD = ("torch", "torch._dynamo", "wanma.api.session", "wanma.training.session")


def launch_script(
    script: Path,
    arguments: Sequence[str],
    ranks: int,
    *,
    run_directory: Path | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Run `script` once per rank; its `wanma.session` finds its rank by itself.

    Args:
        arguments: the script's own.
        ranks: processes on this machine, and on each of the others.
        run_directory: default: runs / the script's name.
        overrides: keys of `[cluster]`, e.g. 'cluster.nodes=2'.

    Returns:
        the exit code, as of `train_job`.

    Raises:
        WanmaError: before anything was started.
    """
    section = cluster_section(overrides)
    check_interface(section.interface)
    run = RunDirectory(run_directory or Path("runs") / script.stem)
    run.create()
    with only_one(run) if section.nodes == 1 else nullcontext(), _ScriptConsole(run) as console:
        earlier = events_so_far(run)
        outcome = run_local(_launch(run, script, arguments, ranks, section), console.write)
        failure = outcome.message if outcome.failure is not None else None
        if failure is not None:
            console.write({"kind": "message", "level": "error", "text": failure})
        if run.job.exists():  # a session was opened here: this is a run
            record_end(run, failure, console.write, earlier)
    return outcome.exit_code


def cluster_section(overrides: Sequence[str]) -> ClusterSection:
    """The `[cluster]` of `overrides`; of the rest of a job the script itself decides.

    Raises:
        JobError: another section's key, or a wrong value.
    """
    for text in overrides:
        if (path := parse_override(text).path)[0] != "cluster":
            raise JobError(
                f"wanma launch: {'.'.join(path)} is for the script to say, which makes the job",
                "keys of [cluster] can be given here, e.g. cluster.hang_seconds=900",
            )
    job = job_from({"model": {"factory": OWN_MODEL}}, overrides)
    refuse_elastic(job, "wanma launch")
    return job.cluster


def run_script(worker: Worker, payload: bytes) -> None:
    """Entry of each rank: the script as `__main__`, with its own arguments and folder."""
    order = json.loads(payload)
    script = order["script"]
    sys.argv = [script, *order["arguments"]]
    sys.path.insert(0, str(Path(script).parent))
    current_worker.set(worker)
    launched_cluster.set(ClusterSection(**order["cluster"]))
    # The names that scripts for torchrun read.
    os.environ.update(
        RANK=str(worker.rank), LOCAL_RANK=str(worker.local_rank), WORLD_SIZE=str(worker.world_size)
    )
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            why = f"exit code {leaving.code}" if isinstance(leaving.code, int) else str(leaving.code)
            raise WanmaError(f"{Path(script).name} ended itself: {why}") from leaving


def _launch(
    run: RunDirectory, script: Path, arguments: Sequence[str], ranks: int, section: ClusterSection
) -> Launch:
    cluster = discover()
    has_gpu = section.device != "cpu" and any(node.devices for node in cluster.nodes)
    threads = section.threads_per_rank or max(cluster.nodes[0].cores // ranks, 1)
    plan = Plan(
        dp_replicate=ranks * section.nodes,
        threads_per_rank=threads,
        device="cuda" if has_gpu else "cpu",
    )
    given = section.model_dump(mode="json", exclude_unset=True)
    order = {"script": str(script.absolute()), "arguments": list(arguments), "cluster": given}
    return Launch(
        run_directory=run.path.absolute(),
        entry="wanma.api.launch:run_script",
        payload=json.dumps(order).encode(),
        preload=PRELOAD,
        ranks_per_node=ranks,
        threads_per_rank=threads,
        nodes=section.nodes,
        node_rank=section.node_rank,
        rendezvous=section.rendezvous,
        interface=section.interface,
        position=position_of(section, os.environ).text,
        environment=worker_environment(section, plan),
        start_seconds=section.start_seconds,
        hang_seconds=section.hang_seconds,
        job_hash=_agreed(script, arguments, ranks, section),
        retries=section.retries,
    )


def _agreed(script: Path, arguments: Sequence[str], ranks: int, section: ClusterSection) -> str:
    """What the machines of one launch must have in common, wherever the script lies on each."""
    own = {"node_rank": None, "interface": None, "place": None, "threads_per_rank": None}
    placeless = section.model_copy(update=own)
    together = [list(arguments), ranks, placeless.model_dump(mode="json")]
    content = script.read_bytes() + json.dumps(together, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


class _ScriptConsole:
    """The console that the script's job asks for, from when its session says so; plain lines before."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._stack = ExitStack()
        self._console: Console | None = None
        self._before = Console(run, 0, sys.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._console is None:
            self._before.line(f"run directory: {self._run.path}")
            self._before.stream.let_go()

    def write(self, event: Event) -> None:
        if self._console is not None:
            self._console.write(event)
        elif event["kind"] == SESSION:
            observe = ObserveSection(**event["observe"])
            self._console = self._stack.enter_context(open_console(self._run, observe, event["steps"]))
        elif "text" in event:
            self._before.show(event)
