"""Attention over a sequence that ranks share, ring and all-to-all: what one process computes of all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from support.ranks import run_ranks
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.layers.attention import AttentionMask, DotProductAttention
from wanma.models.structure.parallel_spec import ParallelSpec
from wanma.parallel.context.context_parallel import apply_context_parallel
from wanma.parallel.context.sequence_shards import context_rank_positions
from wanma.parallel.memory.recompute import apply_recompute
from wanma.parallel.mesh.parallel_mesh import open_mesh
from wanma.parallel.profiling.collective_counter import CollectiveCounter

ROWS, LENGTH = 3, 32


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 4
    width: int = 8
    value_width: int = 8
    documents: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64


CASES = {
    "as many key/value heads": Case(),
    "grouped heads": Case(kv_heads=2),
    "one key/value head": Case(kv_heads=1, scale=0.2),
    "three key/value heads": Case(heads=12, kv_heads=3),
    "odd width": Case(kv_heads=2, width=7, value_width=7),
    "values of another width": Case(kv_heads=2, value_width=5),
    "documents": Case(kv_heads=2, documents=True),
    "documents and values of another width": Case(kv_heads=2, value_width=6, documents=True, scale=0.3),
    "fp32": Case(kv_heads=2, dtype=torch.float32),
    "bf16": Case(kv_heads=2, dtype=torch.bfloat16),
    "bf16 documents": Case(kv_heads=2, documents=True, dtype=torch.bfloat16),
}
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 5e-2}
SPREAD = [("ring", 2), ("ring", 4), ("all_to_all", 2), ("all_to_all", 4)]


class Attention(nn.Module):
    """The two modules that context parallelism replaces."""

    layout = ParallelSpec(blocks=None, mask_module="mask", attention_cores="core")

    def __init__(self) -> None:
        super().__init__()
        self.mask = AttentionMask()
        self.core = DotProductAttention()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, scale: float | None
    ) -> Tensor:
        attended: Tensor = self.core(query, key, value, self.mask(documents), scale)
        return attended


def whole_tensors(case: Case) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Query, key and value; documents; the output's gradient."""
    draw = torch.Generator().manual_seed(3)

    def make(heads: int, width: int) -> Tensor:
        return torch.randn(ROWS, LENGTH, heads, width, generator=draw, dtype=torch.float64).to(case.dtype)

    inputs = [
        make(case.heads, case.width),
        make(case.kv_heads, case.width),
        make(case.kv_heads, case.value_width),
    ]
    gradient = make(case.heads, case.value_width)
    # The second row has long documents, the third one per token, so that its queries see nothing elsewhere.
    longest = torch.tensor([[5], [20], [1]])
    documents = (torch.arange(LENGTH) // longest) if case.documents else None
    return inputs, documents, gradient


def attend_in_ranks(worker: WorkerContext, kind: Any) -> dict[str, Any]:
    """All cases on one rank: its positions, output and gradients by case."""
    results: dict[str, Any] = {}
    with open_mesh(worker, Plan(cp=worker.world_size, cp_method=kind), 60) as grid:
        model = Attention()
        apply_context_parallel(model, model.layout, grid)
        positions = context_rank_positions(LENGTH, kind, worker.world_size, grid.coordinate("cp"))
        for name, case in CASES.items():
            inputs, documents, gradient = whole_tensors(case)
            mine = [x[:, positions].requires_grad_() for x in inputs]
            output = model(*mine, None if documents is None else documents[:, positions], case.scale)
            output.backward(gradient[:, positions])
            assert output.dtype == case.dtype
            results[name] = [
                part.detach().double().numpy()
                for part in (output, *(x.grad for x in mine if x.grad is not None))
            ]
    return {"positions": positions.numpy(), **results}


@pytest.fixture(scope="module", params=SPREAD, ids=lambda spread: f"{spread[0]}-{spread[1]}")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    kind, size = request.param
    return run_ranks(attend_in_ranks, size, (kind,), is_reused=True)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_sequence_attend_as_one_process_does(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    case = CASES[name]
    inputs, documents, gradient = whole_tensors(case)
    whole = [x.double().requires_grad_() for x in inputs]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    query, key, value = (x.transpose(1, 2) for x in whole)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=case.scale, enable_gqa=True
    ).transpose(1, 2)
    expected.backward(gradient.double())
    positions = np.concatenate([rank["positions"] for rank in ranks])
    assert sorted(positions) == list(range(LENGTH))
    for part, want in enumerate([expected.detach(), *(x.grad for x in whole)]):
        got = np.empty(want.shape)
        got[:, positions] = np.concatenate([rank[name][part] for rank in ranks], axis=1)
        torch.testing.assert_close(torch.from_numpy(got), want, rtol=0, atol=TOLERANCES[case.dtype])


def largest_allocation(worker: WorkerContext, kind: Any, length: int, with_documents: bool) -> int:
    """Bytes of the largest piece of memory that one head of attention takes, forward and backward."""
    with open_mesh(worker, Plan(cp=worker.world_size, cp_method=kind), 60) as grid:
        model = Attention()
        apply_context_parallel(model, model.layout, grid)
        local, heads = length // worker.world_size, worker.world_size
        query = torch.randn(1, local, heads, 4, requires_grad=True)
        documents = torch.zeros(1, local, dtype=torch.int64) if with_documents else None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            model(query, query, query, documents, None).sum().backward()
        assert profiler.profiler is not None
        events = profiler.profiler.kineto_results.events()
        return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize(("kind", "documents"), [("ring", False), ("ring", True), ("all_to_all", False)])
def test_no_rank_holds_scores_of_a_whole_sequence(kind: str, documents: bool) -> None:
    length, fp32 = 2048, 4
    for taken in run_ranks(largest_allocation, 4, (kind, length, documents)):
        assert taken >= length * fp32  # something was seen
        # A ring holds a mask of its own block at most; flash operators hold a tile of 256 × 512 scores.
        assert taken <= length * length * fp32 // 16


def messages_of_backward(worker: WorkerContext, kind: Any) -> int:
    """Number of messages of a ring in the backward of a block that recomputes."""
    with open_mesh(worker, Plan(cp=worker.world_size), 60) as grid:
        model = Attention()
        apply_context_parallel(model, model.layout, grid)
        apply_recompute([model], Plan(recompute=kind))
        query = torch.randn(1, 4, 4, 8, requires_grad=True)
        output = model(query, query, query, None, None)
        sent = 0
        begin = dist.batch_isend_irecv

        def count(operations: list[dist.P2POp]) -> list[dist.Work]:
            nonlocal sent
            sent += 1
            return begin(operations)

        with mock.patch.object(dist, "batch_isend_irecv", count):
            output.sum().backward()
        return sent


@pytest.mark.parametrize(("kind", "messages"), [("none", 3), ("selective", 3), ("full", 4)])
def test_selective_recompute_keeps_a_rings_result_and_full_sends_again(kind: str, messages: int) -> None:
    assert run_ranks(messages_of_backward, 2, (kind,), is_reused=True) == [messages] * 2


def sent_and_told(worker: WorkerContext, dtype: torch.dtype) -> tuple[list[int], dict[str, list[int]]]:
    """Bytes of the messages that a ring sends, and those that a recorder is told of, by kind."""
    sent: list[int] = []
    begin = dist.batch_isend_irecv

    def count(operations: list[dist.P2POp]) -> list[dist.Work]:
        sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return begin(operations)

    with open_mesh(worker, Plan(cp=worker.world_size), 60) as grid:
        model = Attention()
        apply_context_parallel(model, model.layout, grid)
        query = torch.randn(1, 4, 4, 8, dtype=dtype, requires_grad=True)
        with mock.patch.object(dist, "batch_isend_irecv", count), CollectiveCounter() as recorder:
            model(query, query[:, :, :2], query[:, :, :2, :6], None, None).sum().backward()
        told = {
            kind: [c.tensor_bytes for c in recorder.counts.elements() if c.operation == kind]
            for kind in ("send", "receive")
        }
        assert {c.group_ranks for c in recorder.counts} == {tuple(range(worker.world_size))}
    return sent, told


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_recorder_is_told_of_every_message_of_a_ring(dtype: torch.dtype) -> None:
    for sent, told in run_ranks(sent_and_told, 3, (dtype,), is_reused=True):
        assert len(sent) == (3 - 1) + (3 - 1) + 3  # keys and values both ways, and their gradients
        assert sorted(told["send"]) == sorted(sent)
        assert sorted(told["receive"]) == sorted(sent)
