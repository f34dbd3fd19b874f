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

from wanma.models.huggingface.forward_probe import hidden_states_argument
from wanma.torch_internals.modules import registered_buffers, registered_parameters


class StageBoundary:
    """Input and output of a stage's blocks while its forward runs."""

    def __init__(self, block_output_count: int | None, *, is_first: bool, is_last: bool) -> None:
        self.block_output_count = block_output_count
        """Length of the tuple that a block returns, as in `ProbeResult`; None: it returns a tensor."""
        self.is_first = is_first
        self.is_last = is_last
        self.stage_input: Tensor | None = None
        self.stage_output: Tensor | None = None

    def pop_input(self) -> Tensor:
        """Return the stage's input, once."""
        stage_input, self.stage_input = self.stage_input, None
        assert stage_input is not None, "a stage's blocks are entered once"
        return stage_input

    def store_output(self, hidden: Tensor) -> Tensor:
        """Store the stage's output; the modules after it get unused values."""
        self.stage_output = hidden
        return torch.empty_like(hidden)

    def pop_output(self) -> Tensor:
        """Return the stage's output, once."""
        result, self.stage_output = self.stage_output, None
        assert result is not None, "a stage's blocks are left once"
        return result


def keep_blocks(blocks: nn.Module, kept_blocks: range, stage_boundary: StageBoundary) -> None:
    """Keep the blocks in `kept_blocks` of a list, in their places; make the others pass on their input."""
    children = list(blocks.named_children())
    for number, (name, block) in enumerate(children):
        is_entry = not stage_boundary.is_first and number == max(kept_blocks.start - 1, 0)
        is_exit = not stage_boundary.is_last and number == min(kept_blocks.stop, len(children) - 1)
        if number not in kept_blocks:
            setattr(blocks, name, _make_absent(block, stage_boundary, is_entry=is_entry, is_exit=is_exit))
        elif (is_entry and kept_blocks.start == 0) or (is_exit and kept_blocks.stop == len(children)):
            _make_edge(block, stage_boundary, is_entry=is_entry and kept_blocks.start == 0, is_exit=is_exit)


class _StageEdgeBlock(nn.Module):
    """Mixin before a block's class, for a block at which a stage begins or ends.

    It acts outside of a module's hooks, among which are FSDP2's, and of compiled code.
    """

    _stage_boundary: StageBoundary
    _is_entry: bool
    _is_exit: bool

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._is_entry:
            if arguments:
                arguments = (self._stage_boundary.pop_input(), *arguments[1:])
            else:
                keywords = {**keywords, hidden_states_argument(self): self._stage_boundary.pop_input()}
        output = super().__call__(*arguments, **keywords)
        if not self._is_exit:
            return output
        if isinstance(output, tuple):
            return (self._stage_boundary.store_output(output[0]), *output[1:])
        return self._stage_boundary.store_output(output)


class _AbsentBlock(_StageEdgeBlock):
    """Mixin before the class of a block that another stage holds. It has attributes but no children."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        hidden: Tensor = arguments[0] if arguments else keywords[hidden_states_argument(self)]
        if self._is_entry:
            hidden = self._stage_boundary.pop_input()
        if self._is_exit:
            hidden = self._stage_boundary.store_output(hidden)
        outputs = self._stage_boundary.block_output_count
        return hidden if outputs is None else (hidden, *[None] * (outputs - 1))


def _make_edge(
    block: nn.Module,
    stage_boundary: StageBoundary,
    *,
    is_entry: bool,
    is_exit: bool,
    kind: type = _StageEdgeBlock,
) -> None:
    # FSDP2 names its wrappers after it, and a class's own parameters have no wrapper's prefix.
    block.__class__ = type(type(block).__name__, (kind, type(block)), {})
    edge_block: Any = block
    edge_block._stage_boundary, edge_block._is_entry, edge_block._is_exit = stage_boundary, is_entry, is_exit


def _make_absent(
    block: nn.Module, stage_boundary: StageBoundary, *, is_entry: bool, is_exit: bool
) -> nn.Module:
    for name, _ in list(block.named_children()):
        delattr(block, name)
    registered_parameters(block).clear()
    registered_buffers(block).clear()
    _make_edge(block, stage_boundary, is_entry=is_entry, is_exit=is_exit, kind=_AbsentBlock)
    return block


def pass_through(*arguments: Any, **keywords: Any) -> Any:
    """Return the first tensor argument: forward of a module that another stage holds."""
    return next(value for value in (*arguments, *keywords.values()) if isinstance(value, Tensor))


def placeholder_embedding(stage_boundary: StageBoundary, width: int) -> Callable[..., Tensor]:
    """Return the forward of an embedding that another stage holds: zeros in the stage's precision.

    They are of one token, because a rank of split sequences gets fewer hidden states than positions.
    """

    def zeros(*arguments: Any, **keywords: Any) -> Tensor:
        numbers, stage_input = pass_through(*arguments, **keywords), stage_boundary.stage_input
        dtype = stage_input.dtype if stage_input is not None else None
        return torch.zeros((*[1] * numbers.ndim, width), dtype=dtype, device=numbers.device)

    return zeros
