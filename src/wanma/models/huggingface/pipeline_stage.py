"""Pipeline stage of a transformers model: the blocks of other stages pass their input on.

Transformers' forward runs completely in every stage: it has arithmetic before, around and after the blocks
that no plan names, and asks for the number of a block. So an absent block keeps its place in the list. The
last one before the stage's own returns the stage's input, whatever came before the blocks; the first one
after them stores the stage's output. Modules after the blocks then run on unused values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wanma.models.huggingface.forward_probe import hidden_name


class Passage:
    """Input and output of a stage's blocks while its forward runs."""

    def __init__(self, outputs: int | None, *, is_first: bool, is_last: bool) -> None:
        self.outputs = outputs
        """Length of the tuple that a block returns, as in `Findings`; None: it returns a tensor."""
        self.is_first = is_first
        self.is_last = is_last
        self.given: Tensor | None = None
        self.result: Tensor | None = None

    def enter(self) -> Tensor:
        """Return the stage's input, once."""
        given, self.given = self.given, None
        assert given is not None, "a stage's blocks are entered once"
        return given

    def leave(self, hidden: Tensor) -> Tensor:
        """Store the stage's output; the modules after it get unused values."""
        self.result = hidden
        return torch.empty_like(hidden)

    def take(self) -> Tensor:
        """Return the stage's output, once."""
        result, self.result = self.result, None
        assert result is not None, "a stage's blocks are left once"
        return result


def keep_blocks(blocks: nn.Module, held: range, passage: Passage) -> None:
    """Keep the blocks in `held` of a list of blocks, in their places; make the others pass on their input."""
    children = list(blocks.named_children())
    for number, (name, block) in enumerate(children):
        enters = not passage.is_first and number == max(held.start - 1, 0)
        leaves = not passage.is_last and number == min(held.stop, len(children) - 1)
        if number not in held:
            setattr(blocks, name, _absent(block, passage, enters=enters, leaves=leaves))
        elif (enters and held.start == 0) or (leaves and held.stop == len(children)):
            _make_edge(block, passage, enters=enters and held.start == 0, leaves=leaves)


class _Edge(nn.Module):
    """Mixin before a block's class, for a block at which a stage begins or ends.

    It acts outside of a module's hooks, among which are FSDP2's, and of compiled code.
    """

    _passage: Passage
    _enters: bool
    _leaves: bool

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._enters:
            if arguments:
                arguments = (self._passage.enter(), *arguments[1:])
            else:
                keywords = {**keywords, hidden_name(self): self._passage.enter()}
        output = super().__call__(*arguments, **keywords)
        if not self._leaves:
            return output
        if isinstance(output, tuple):
            return (self._passage.leave(output[0]), *output[1:])
        return self._passage.leave(output)


class _Absent(_Edge):
    """Mixin before the class of a block that another stage holds. It has attributes but no children."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        hidden: Tensor = arguments[0] if arguments else keywords[hidden_name(self)]
        if self._enters:
            hidden = self._passage.enter()
        if self._leaves:
            hidden = self._passage.leave(hidden)
        outputs = self._passage.outputs
        return hidden if outputs is None else (hidden, *[None] * (outputs - 1))


def _make_edge(block: nn.Module, passage: Passage, *, enters: bool, leaves: bool, kind: type = _Edge) -> None:
    # FSDP2 names its wrappers after it, and a class's own parameters have no wrapper's prefix.
    block.__class__ = type(type(block).__name__, (kind, type(block)), {})
    edge: Any = block
    edge._passage, edge._enters, edge._leaves = passage, enters, leaves


def _absent(block: nn.Module, passage: Passage, *, enters: bool, leaves: bool) -> nn.Module:
    for name, _ in list(block.named_children()):
        delattr(block, name)
    for tensors in (block._parameters, block._buffers):
        tensors.clear()
    _make_edge(block, passage, enters=enters, leaves=leaves, kind=_Absent)
    return block


def hand_on(*arguments: Any, **keywords: Any) -> Any:
    """Return the first tensor argument: forward of a module that another stage holds."""
    return next(value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor))


def no_embedding(passage: Passage, width: int) -> Callable[..., Tensor]:
    """Return the forward of an embedding that another stage holds: zeros in the stage's precision.

    They are of one token, because a rank of split sequences gets fewer hidden states than positions.
    """

    def zeros(*arguments: Any, **keywords: Any) -> Tensor:
        numbers, given = hand_on(*arguments, **keywords), passage.given
        kind = given.dtype if given is not None else None
        return torch.zeros((*[1] * numbers.ndim, width), dtype=kind, device=numbers.device)

    return zeros
