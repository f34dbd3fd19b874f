"""The rank that reads for its peer, or the peer, is killed: the run goes on with the same samples."""

from __future__ import annotations

import pytest

from support.command import Desk, assert_bitwise_equal
from support.injection import Fault
from support.recovered import COMMON, meet

PEERS = ("parallel.dp_replicate=1", "parallel.tp=2", "data.shared_reading=always")
pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "fault",
    [
        Fault("kill", rank=0, step=7, phase="forward and backward"),
        Fault("kill", rank=1, step=7, phase="waiting for data"),
        Fault("raise", rank=0, step=7, phase="waiting for data"),
    ],
    ids=["the reader is killed", "the peer is killed", "the reader fails"],
)
def test_a_rank_that_shares_its_reading_is_lost_and_nothing_else(desk: Desk, fault: Fault) -> None:
    whole = desk.run("train", *COMMON, *PEERS, "--run-dir", "whole")
    whole.check()
    met = meet(desk, "met", fault, overrides=PEERS)
    met.ran.check()
    [recovery] = met.recoveries
    assert f"rank {fault.rank} (" in recovery["failure"]
    assert "connection closed by peer" not in recovery["failure"]
    expected = desk.training("whole")
    losses = {step["step"]: step["loss"] for step in met.training.metrics}
    assert losses == {step["step"]: step["loss"] for step in expected.metrics}
    assert_bitwise_equal(met.training.state(), expected.state())
