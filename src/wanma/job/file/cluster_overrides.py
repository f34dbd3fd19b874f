"""Overrides of commands that take no job: only the `[cluster]` section matters to them."""

from __future__ import annotations

from collections.abc import Sequence

from wanma.job.errors import JobError
from wanma.job.file.loading import parse_override, to_job
from wanma.job.node_range import require_fixed_nodes
from wanma.job.sections.cluster import ClusterSection

_ANY_MODEL = {"model": {"preset": "gpt-1m"}}
"""Model of the job that validates the overrides; it is never built."""


def parse_cluster_section(overrides: Sequence[str], command: str, hint: str) -> ClusterSection:
    """Return the `[cluster]` section of `overrides`, with a fixed number of nodes.

    Args:
        overrides: keys of `[cluster]`, such as 'cluster.nodes=2'.
        command: command that takes them, as errors name it.
        hint: way out for a key of another section.

    Raises:
        JobError: a key of another section, a wrong value, or a range of nodes.
    """
    for text in overrides:
        if (path := parse_override(text).path)[0] != "cluster":
            raise JobError(f"{command}: {'.'.join(path)} is not a key of [cluster]", hint)
    job = to_job(_ANY_MODEL, overrides)
    require_fixed_nodes(job, command)
    return job.cluster
