"""Repeated blocks are found by structure, in whatever arrangement a user's model has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from wanma.models.structure.repeated_blocks import find_repeated_blocks, find_shared_parameters


def block(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.down = nn.Linear(width, 2 * width)


class WithExperts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)
        self.experts = nn.ModuleList(block() for _ in range(experts))


def holding(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list beside others": (
        lambda: holding(
            stem=nn.Linear(8, 8),
            body=holding(stack=nn.ModuleList(block() for _ in range(3))),
            head=nn.Linear(8, 90),
        ),
        ["body.stack.0", "body.stack.1", "body.stack.2"],
    ),
    "an encoder and a decoder": (
        lambda: nn.Transformer(8, 2, 2, 3, 16),
        [f"encoder.layers.{n}" for n in range(2)] + [f"decoder.layers.{n}" for n in range(3)],
    ),
    "stages that grow, with blocks inside": (
        lambda: holding(stages=nn.ModuleList([Stage(8, 2), Stage(16, 3)])),
        ["stages.0.blocks.0", "stages.0.blocks.1"] + [f"stages.1.blocks.{n}" for n in range(3)],
    ),
    "levels that grow, without": (
        lambda: holding(down=nn.ModuleList(block(width) for width in (8, 16, 32))),
        ["down.0", "down.1", "down.2"],
    ),
    "layers with experts": (
        lambda: holding(layers=nn.ModuleList([WithExperts(2), *(WithExperts(8) for _ in range(3))])),
        [f"layers.{n}" for n in range(4)],
    ),
    "lists of lists": (
        lambda: holding(
            down=nn.ModuleList(nn.ModuleList([block(), nn.Linear(8, 8), nn.Identity()]) for _ in range(2))
        ),
        ["down.0.0", "down.0.1", "down.1.0", "down.1.1"],
    ),
    "a pair too small to matter": (
        lambda: holding(
            layers=nn.ModuleList(block(64) for _ in range(4)),
            pair=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
        ),
        [f"layers.{n}" for n in range(4)],
    ),
    "a sequence of its own": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["0", "1"]),
    "none": (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_of(name: str) -> None:
    make, expected = CASES[name]
    model = make()
    names = {id(module): path for path, module in model.named_modules()}
    assert [names[id(found)] for found in find_repeated_blocks(model)] == expected


def test_parameters_that_a_block_shares_are_known() -> None:
    model = holding(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), head=nn.Linear(4, 4))
    first, second, third, fourth = blocks = find_repeated_blocks(model)
    assert find_shared_parameters(model, blocks) == set()
    second.weight = first.weight
    model.head.weight = third.weight
    assert find_shared_parameters(model, blocks) == {id(first.weight), id(third.weight)}
    twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    twice[0].weight = twice[1].weight  # within one block it is nobody else's business
    assert find_shared_parameters(holding(layers=nn.ModuleList([twice])), [twice]) == set()
    assert fourth.weight is not third.weight
