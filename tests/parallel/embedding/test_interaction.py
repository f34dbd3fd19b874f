"""The compiled interaction has the products and gradients of torch's operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wanma.models.recommender.click_models import interact
from wanma.parallel.embedding.interaction import interact_compiled
from wanma.parallel.embedding.native_rows import load_rows_library


def vectors(count: int, width: int, dtype: torch.dtype, rows: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, rows, width, dtype=torch.float64, generator=generator)
    return [one.to(dtype).requires_grad_() for one in values]


@pytest.mark.parametrize("keeps_first", [True, False])
@pytest.mark.parametrize(("count", "width"), [(1, 4), (2, 16), (17, 3), (27, 16), (33, 20)])
def test_products_and_gradients_are_those_of_torch(count: int, width: int, keeps_first: bool) -> None:
    assert load_rows_library() is not None
    results = []
    for function in (interact, interact_compiled):
        given = vectors(count, width, torch.float32)
        output = function(given, keeps_first)
        columns = count * (count - 1) // 2 + width * keeps_first
        assert not output[:, columns:].any()
        output = output[:, :columns]
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        (output * weights).sum().backward()
        results.append([output.detach(), *(one.grad for one in given if one.grad is not None)])
    assert len(results[1]) == 1 + count
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            given = vectors(27, 16, torch.float32, rows=3000)
            output = interact_compiled(given, True)
            output.square().sum().backward()
            results.append([output, *(one.grad for one in given)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (6, 8)])
def test_vectors_of_several_shapes_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        interact_compiled([torch.zeros(5, 8), torch.zeros(shape)], True)


def test_vectors_may_lie_anywhere_and_be_none_and_are_differentiated_once() -> None:
    one, other = torch.randn(8, 5).T, torch.randn(5, 16)[:, ::2].requires_grad_()
    output = interact_compiled([one, other], False)
    torch.testing.assert_close(output[:, :1], (one * other).sum(1, keepdim=True))
    (gradient,) = torch.autograd.grad(output.square().sum(), other, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
    nothing = torch.zeros(0, 8, requires_grad=True)
    interact_compiled([nothing, nothing], True).sum().backward()
    assert nothing.grad is not None
    assert interact_compiled([torch.full((2, 8), torch.nan), torch.ones(2, 8)], True)[:, :9].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_computed_by_torch(dtype: torch.dtype) -> None:
    given = vectors(4, 8, dtype)
    assert torch.equal(interact_compiled(given, True), interact(given, True))
