"""Overrides of commands without a job: keys of `[cluster]` alone, with a fixed number of nodes."""

from __future__ import annotations

import pytest

from wanma.job.errors import JobError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.sections.cluster import ClusterSection


def parse(*overrides: str) -> ClusterSection:
    return parse_cluster_section(overrides, "wanma launch", "set it in the script")


def test_keys_of_the_cluster_section_are_read() -> None:
    section = parse("cluster.hang_timeout_seconds=9", "cluster.nodes=1")
    assert section == ClusterSection(hang_timeout_seconds=9, nodes=1)


def test_a_key_of_another_section_is_refused_with_the_commands_hint() -> None:
    with pytest.raises(JobError, match=r"train\.steps") as refused:
        parse("cluster.hang_timeout_seconds=9", "train.steps=3")
    assert refused.value.hint == "set it in the script"


def test_a_misspelt_key_is_refused_with_the_closest_one() -> None:
    with pytest.raises(JobError, match=r"'cluster\.hang_timeout_seconds'"):
        parse("cluster.hang_timeout_second=9")


def test_a_range_of_nodes_is_refused_with_the_largest_number() -> None:
    with pytest.raises(JobError, match=r"'2\.\.3': .* fixed number") as refused:
        parse("cluster.nodes=2..3", "cluster.rendezvous=a:1")
    assert "set cluster.nodes = 3" in refused.value.hint
