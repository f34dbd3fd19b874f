"""Attention over a sequence that ranks share, ring and all-to-all: what one process computes of all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.ranks import run_ranks
from wanma.job.plan import Plan
from wanma.job.worker import Worker
from wanma.models.attention import AttentionMask, DotProductAttention
from wanma.models.layout import Layout
from wanma.parallel.context import split_context
from wanma.parallel.mesh import process_grid
from wanma.parallel.sequence import context_positions

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

    layout = Layout(blocks=None, mask="mask", attention="core")

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


def attend_in_ranks(worker: Worker, kind: Any) -> dict[str, Any]:
    """All cases on one rank: its positions, output and gradients by case."""
    results: dict[str, Any] = {}
    with process_grid(worker, Plan(cp=worker.world_size, context=kind), 60) as grid:
        model = Attention()
        split_context(model, model.layout, grid)
        positions = context_positions(LENGTH, kind, worker.world_size, grid.at("cp"))
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
    return run_ranks(attend_in_ranks, size, (kind,))


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


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(x.numel() for x in made if isinstance(x, Tensor))])
        return result


def largest_tensor(worker: Worker, kind: Any, length: int, with_documents: bool) -> int:
    """Elements of the largest tensor that one head of attention makes, forward and backward."""
    with process_grid(worker, Plan(cp=worker.world_size, context=kind), 60) as grid:
        model = Attention()
        split_context(model, model.layout, grid)
        local, size = length // worker.world_size, worker.world_size
        query = torch.randn(1, local, size, 4, requires_grad=True)
        documents = torch.zeros(1, local, dtype=torch.int64) if with_documents else None
        with Largest() as largest:
            model(query, query, query, documents, None).sum().backward()
        return largest.elements


@pytest.mark.parametrize(("kind", "documents"), [("ring", False), ("ring", True), ("all_to_all", False)])
def test_no_rank_holds_scores_of_a_whole_sequence(kind: str, documents: bool) -> None:
    length = 1024
    for elements in run_ranks(largest_tensor, 4, (kind, length, documents)):
        assert elements >= length * 4  # something was seen
        assert elements <= length * length // 16
