"""FSDP2's waits on a GPU: its stream waits inside three calls, which are timed there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from support.fake_stream import FakeStream
from wanma.collectives.timing.communication_timer import CommunicationTimer
from wanma.parallel.data_parallel.sharded import _time_device_waits
from wanma.torch_internals.fake_tensors import FAKE_BACKEND, FakeStore
from wanma.torch_internals.fsdp import parameter_group


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(FAKE_BACKEND, rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_waits_for_gathers_and_reductions_are_timed() -> None:
    stream, unit = FakeStream(), nn.Linear(4, 4)
    fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    assert isinstance(unit, FSDPModule)
    parameters, timer = parameter_group(unit), CommunicationTimer(stream.clock)
    assert parameters is not None
    gather, finish = parameters.wait_for_unshard, parameters.finalize_backward

    def wait_for_gather() -> None:
        stream.work(1.0)
        gather()

    def wait_for_reduction() -> None:
        stream.work(4.0)
        finish()

    parameters.wait_for_unshard, parameters.finalize_backward = wait_for_gather, wait_for_reduction
    _time_device_waits(unit, timer)
    loss = unit(torch.ones(2, 4)).sum()
    assert timer.position == 1
    loss.backward()
    # Two waits for the weights, each 1 s; one where the gradients are given, and one for their sum.
    assert timer.position == 4
    stream.synchronize()
    timer.read_waits()
    assert timer.take_totals().exposed_seconds == {"data": pytest.approx(6.0)}
