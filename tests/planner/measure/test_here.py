"""This machine in words."""

from __future__ import annotations

from dataclasses import replace

from wanma.hardware.discovery.node import discover_node
from wanma.job.run.resource_limits import cpu_model
from wanma.planner.calibration.local_node import node_text


def test_a_processor_is_named_once() -> None:
    (node,) = discover_node().nodes
    for one in (node, replace(node, cpu=None)):
        assert node_text(one).count(cpu_model()) == 1
