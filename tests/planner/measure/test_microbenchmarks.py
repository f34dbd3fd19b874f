"""Time of an operator that all ranks run, by one rank's clock."""

from __future__ import annotations

import time

import pytest
import torch

from wanma.planner.calibration.microbenchmarks import timed_run

CPU = torch.device("cpu")


def work(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


def test_ranks_with_cores_of_their_own_are_timed_by_the_clock() -> None:
    measured = timed_run(CPU, 1.0, lambda: lambda: time.sleep(0.002))(0.05)
    assert measured >= 0.002


@pytest.mark.parametrize("shared", [1.5, 2.0])
def test_ranks_that_share_cores_are_timed_by_what_they_compute(shared: float) -> None:
    def run() -> None:
        time.sleep(0.1)  # it is another rank's turn
        work(0.02)

    # Which would be six times as much by the clock.
    assert timed_run(CPU, shared, lambda: run)(0.5) == pytest.approx(0.02 * shared, rel=0.3)
