"""Notices to the user of one node among several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wanma.elastic.coordinator.user_notices import (
    drain_text,
    grace_end_text,
    node_joined_text,
    run_end_text,
)
from wanma.elastic.failure import Failure
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.protocol.messages import AbortCommand, CompletionNotice, StartCommand


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "with rank 4 of 8 (numbered from 0)\n  logs of this node: runs/gpt/logs/rank-4.log"),
        (
            4,
            "with ranks 4-7 of 8 (numbered from 0)\n"
            "  logs of this node: runs/gpt/logs/rank-4.log to rank-7.log",
        ),
    ],
)
def test_a_node_says_where_it_met_the_others_and_what_it_runs(ranks: int, said: str) -> None:
    launch = LaunchConfig(
        Path("runs/gpt"), "a:b", nodes=2, ranks_per_node=ranks, rendezvous="10.0.0.1:29500", node_rank=None
    )
    start = StartCommand(1, node_rank=1, first_rank=4, world_size=8, store_host="10.0.0.1", store_port=1)
    route = "eth0 (10.0.0.4), by the route to the other nodes"
    told = node_joined_text(launch, start, "10.0.0.3:29500", route)
    assert told == (
        f"joined the run at 10.0.0.3:29500 as node rank 1 of 2, {said}\n"
        "  network interface of collectives: eth0 (10.0.0.4), by the route to the other nodes"
    )
    placed = node_joined_text(replace(launch, topology_address="r1/a"), start, "10.0.0.3:29500", "eth0")
    assert placed.endswith("network interface of collectives: eth0\n  topology address: r1/a")


FAILED = AbortCommand(1, Failure("ValueError: no", rank=1, node_rank=1, hostname="b"))


@pytest.mark.parametrize(
    ("ending", "node", "said"),
    [
        (CompletionNotice(0), 1, "the run finished on all 2 nodes"),
        (CompletionNotice(0), 0, ""),
        (
            CompletionNotice(143),
            1,
            "the run stopped on request on all 2 nodes; rerun the same command on each to resume",
        ),
        (
            AbortCommand(130),
            1,
            "the run was aborted on request; rerun the same command on every node to resume",
        ),
        (FAILED, 0, "the run failed on node 1 (b); the ranks on this node were ended as well"),
        (FAILED, 1, ""),
        (AbortCommand(1, Failure("lost the coordinator")), 1, ""),
    ],
)
def test_the_end_is_told_where_nothing_else_tells_it(
    ending: AbortCommand | CompletionNotice, node: int, said: str
) -> None:
    assert run_end_text(ending, 2, node, has_rank_0=node == 0) == said


@pytest.mark.parametrize(
    ("exit_code", "here", "said"),
    [
        (130, True, "Ctrl-C (press again to abort at once)"),
        (130, False, "Ctrl-C on another node"),
        (143, True, "SIGTERM"),
        (143, False, "SIGTERM on another node"),
    ],
)
def test_a_stop_says_who_asked_for_it(exit_code: int, here: bool, said: str) -> None:
    assert drain_text(exit_code, here) == f"stopping after this step: {said}"


def test_a_script_without_a_session_has_neither_steps_nor_checkpoints() -> None:
    assert drain_text(143, True, has_steps=False) == "stopping the script: SIGTERM"
    said = grace_end_text(is_departure=False, has_steps=False)
    assert said.startswith("the grace period (cluster.grace_seconds) ended before the script did: ")
    assert "step" not in said
    assert "checkpoint" not in said
    assert "before the step or its checkpoint" in grace_end_text(is_departure=False)
