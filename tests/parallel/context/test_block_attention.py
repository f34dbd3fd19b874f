"""Attention of blocks: their log-sum-exps merge, and their gradients add up, to attention of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from wanma.parallel.context import block_attention
from wanma.parallel.context.block_attention import (
    BlockVisibility,
    compute_block_attention,
    compute_block_attention_backward,
)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LENGTH = 24


def tensors(
    heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output's gradient, as a model's projections lie in memory."""
    draw = torch.Generator().manual_seed(7)

    def make(heads: int, width: int) -> Tensor:
        whole = torch.randn(2, LENGTH, heads, width, generator=draw, dtype=torch.float64)
        return whole.to(dtype).transpose(1, 2)

    return make(heads, width), make(kv_heads, width), make(kv_heads, value_width), make(heads, value_width)


def documents(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (2, LENGTH), generator=draw).sort(dim=1).values


def visible(sight: BlockVisibility) -> Tensor:
    """(rows or 1, 1, queries, keys)."""
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    if sight.document_ids is not None:
        queries, keys = sight.document_ids
        mask = (queries[:, :, None] == keys[:, None, :]).unsqueeze(1)
    return mask.tril() if sight.causal else mask


def expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the definition, in fp64; zero and −infinity where a query sees nothing."""
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    seen = mask.any(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~seen, 0.0), dim=-1) * seen
    return weights @ value, scores.logsumexp(dim=-1)


SIGHTS = {
    "all": BlockVisibility(),
    "causal": BlockVisibility(causal=True),
    "documents": BlockVisibility(
        document_ids=(documents(1), documents(2))
    ),  # some queries find no document of theirs
    "causal documents": BlockVisibility(causal=True, document_ids=(documents(1), documents(1))),
}


@pytest.fixture(params=["flash", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operator, and plain torch as for what the operators cannot do."""
    if request.param == "plain":
        monkeypatch.setattr(block_attention, "_kernel", lambda *_: block_attention._PLAIN)


SHAPES = [(4, 4, 8, 8), (4, 2, 7, 7), (4, 1, 1, 1), (6, 2, 8, 5), (4, 2, 3, 6)]
BLOCKS = [
    pytest.param(
        shape,
        sight,
        dtype,
        id=f"{'-'.join(map(str, shape))}-{sight}-{str(dtype).removeprefix('torch.')}",
        marks=() if (row + column) % len(TOLERANCES) == place else pytest.mark.full,
    )
    for row, shape in enumerate(SHAPES)
    for column, sight in enumerate(SIGHTS)
    for place, dtype in enumerate(TOLERANCES)
]
"""Every pair of a shape, a visibility and a data type; in the full suite every triple."""


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("shape", "sight", "dtype"), BLOCKS)
def test_a_block_gives_output_sum_and_gradients_by_the_definition(
    shape: tuple[int, int, int, int], sight: str, dtype: torch.dtype
) -> None:
    check(tensors(*shape, dtype), SIGHTS[sight], 0.3, TOLERANCES[dtype])


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("sight", SIGHTS)
def test_tiles_change_nothing(sight: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "TILE_ELEMENTS", 5 * 2 * LENGTH)
    check(tensors(4, 2, 8, 5, torch.float64), SIGHTS[sight], 0.3, 1e-12)


def test_the_scale_is_one_over_the_root_of_the_width_where_none_is_given() -> None:
    query, key, value, _ = tensors(4, 2, 8, 8, torch.float64)
    output, _ = compute_block_attention(query, key, value, BlockVisibility(causal=True), None)
    whole = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, whole, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_gradients_of_two_blocks_add_up_to_those_of_the_whole() -> None:
    """Backward of a block takes the output and the sum over all of them."""
    query, key, value, gradient = tensors(4, 2, 8, 5, torch.float64)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    output, log_sum = expected(*whole, mask, 8**-0.5)
    output.backward(gradient)
    half = LENGTH // 2
    shares = [
        compute_block_attention_backward(
            gradient,
            query,
            key[:, :, keys],
            value[:, :, keys],
            output.detach(),
            log_sum.detach(),
            BlockVisibility(),
            None,
        )
        for keys in (slice(0, half), slice(half, LENGTH))
    ]
    of_query = shares[0][0] + shares[1][0]
    torch.testing.assert_close(of_query, whole[0].grad, rtol=0, atol=1e-12)
    for part in (1, 2):
        joined = torch.cat([share[part] for share in shares], dim=2)
        torch.testing.assert_close(joined, whole[part].grad, rtol=0, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("widths", [(64, 64), (60, 33)], ids=str)
def test_a_block_on_a_gpu_gives_output_sum_and_gradients_by_the_definition(
    widths: tuple[int, int], sight: str, dtype: torch.dtype
) -> None:
    asked = SIGHTS[sight]
    pair = (
        None if asked.document_ids is None else (asked.document_ids[0].cuda(), asked.document_ids[1].cuda())
    )
    check(
        tuple(x.cuda() for x in tensors(4, 2, *widths, dtype)),  # type: ignore[arg-type]
        BlockVisibility(asked.causal, pair),
        0.125,
        1e-2 if dtype == torch.float32 else 5e-2,  # fp32 products may be in TF32
    )


def check(
    given: tuple[Tensor, Tensor, Tensor, Tensor], sight: BlockVisibility, scale: float, tolerance: float
) -> None:
    *inputs, gradient = given
    output, log_sum = compute_block_attention(*inputs, sight, scale)
    sums = log_sum.masked_fill(log_sum == -torch.inf, 0.0)
    shares = compute_block_attention_backward(gradient, *inputs, output, sums, sight, scale)

    wanted = [x.double().cpu().requires_grad_() for x in inputs]
    on_cpu = (
        None if sight.document_ids is None else (sight.document_ids[0].cpu(), sight.document_ids[1].cpu())
    )
    wanted_output, wanted_sum = expected(*wanted, visible(BlockVisibility(sight.causal, on_cpu)), scale)
    wanted_output.backward(gradient.double().cpu())

    close: Callable[[Tensor, Any], None] = lambda got, want: torch.testing.assert_close(  # noqa: E731
        got.double().cpu(), want, rtol=0, atol=tolerance
    )
    assert log_sum.dtype == torch.promote_types(gradient.dtype, torch.float32)
    close(output, wanted_output)
    close(log_sum, wanted_sum)
    for share, want in zip(shares, wanted, strict=True):
        close(share, want.grad)
