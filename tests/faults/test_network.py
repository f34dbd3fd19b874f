"""The network between two machines of a run is away for a while, or far: it costs nothing but time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from support.command import Desk, Training
from support.fault_table import Row
from support.injection import Fault, injected
from support.networks import Cable, cable, long_cable
from support.nodes import SHARDED, Machines
from support.recovered import check_whole
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE

PLAN = "ZeRO-3 on 2 nodes"
CUT_SECONDS = 3.0
SLOW = Fault("slow", rank=0, step=1, argument="0.4")  # so that the cut falls into the run

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.full]  # daily: tests/elastic/test_partition.py


class Apart(Machines):
    """Two machines, each in a network of its own."""

    def __init__(self, desk: Desk, name: str, between: Cable, **environment: str) -> None:
        super().__init__(desk, name, *SHARDED, **{SECRET_VARIABLE: "0123456789abcdef"}, **environment)
        self._names, self._place = between.names, f"{between.addresses[0]}:29500"

    def start(self, node: int) -> None:
        self.running[node] = self.command(node, before=("ip", "netns", "exec", self._names[node]))


def test_a_cut_shorter_than_the_deadline(
    desk: Desk, untroubled: Training, note: Callable[[Row], None]
) -> None:
    with cable() as between:
        both = Apart(desk, "cut", between, **injected(desk.folder / "marks-cut", SLOW))
        both.start(0)
        both.start(1)
        assert both.running[0].until(lambda: both.training.steps_begun() >= 4)
        between.pull()
        time.sleep(CUT_SECONDS)
        between.plug_in()
        check_untroubled(both, untroubled)
    note(Row(f"network interrupted for {CUT_SECONDS:.0f} s", PLAN, "", 0, None))


def test_a_long_way(desk: Desk, untroubled: Training, note: Callable[[Row], None]) -> None:
    with long_cable(0.01) as between:
        both = Apart(desk, "long", between)
        both.start(0)
        both.start(1)
        check_untroubled(both, untroubled)
    note(Row("network latency of 10 ms", PLAN, "", 0, None))


def check_untroubled(both: Machines, untroubled: Training) -> None:
    first, second = both.end()
    second.check()
    check_whole(first, both.training, untroubled)
    assert not [event for event in both.training.events if event["kind"] == "recovery"]
