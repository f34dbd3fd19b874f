"""What data ranks exchange once a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wanma.hardware.cluster_text import parse_cluster
from wanma.job.plan import Plan
from wanma.job.sections import Compression
from wanma.planner.cost.compute import streaming_seconds
from wanma.planner.cost.data_parallel import DataParallel
from wanma.planner.cost.machines import machine_of
from wanma.planner.cost.operators import Software

MACHINE = machine_of(parse_cluster("16x8 A100, 1x10G"))
REPLICAS = Plan(dp_replicate=128, precision="bf16", device="cuda")


@pytest.mark.parametrize(
    ("compression", "exchanged", "rounding"),
    [("nothing", 4.0, 0.0), ("bf16", 2.0, 12.0), ("int8", 1 + 4 / 256, 18.0)],
)
def test_compressed_gradients_move_less_and_are_rounded_before_and_read_after(
    compression: Compression, exchanged: float, rounding: float
) -> None:
    plain, compressed = (
        DataParallel(replace(REPLICAS, compression=kind), MACHINE, Software())
        for kind in ("nothing", compression)
    )
    parameters = 1e11  # so that latencies hardly count
    rounded = streaming_seconds(MACHINE.chip, parameters * rounding, 2) if rounding else 0.0
    whole, smaller = plain.once_a_step(parameters)[0], compressed.once_a_step(parameters)[0]
    assert smaller - rounded == pytest.approx(whole * exchanged / 4, rel=0.03)


def test_nobody_rounds_what_is_not_exchanged() -> None:
    alone = DataParallel(Plan(compression="int8", precision="bf16", device="cuda"), MACHINE, Software())
    assert alone.once_a_step(1e9)[0] == 0.0


def test_gradients_that_are_small_already_stay_as_they_are() -> None:
    plan = replace(REPLICAS, compression="bf16")
    assert DataParallel(plan, MACHINE, Software(gradient_bytes=2)).gradient_bytes == 2.0
