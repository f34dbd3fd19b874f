"""Check in the first backward that losses depend on no weights but the model's, which alone are trained."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from wanma.job.errors import JobError
from wanma.parallel.parallelize import ParallelModel

MOVE_INTO_MODEL_HINT = (
    "move these weights into the model: a module that contains both, takes the targets as another input "
    "and returns the losses"
)
FREEZE_HINT = (
    "For weights that must not be trained: call requires_grad_(False), or compute with them under "
    "torch.no_grad()"
)


def refuse_foreign_weights(
    losses: Tensor, outputs: Iterable[Tensor], parallel_model: ParallelModel, rows: int
) -> None:
    """Refuse losses whose gradient reaches weights that are not the model's.

    It follows the graph of the losses as far as the model's outputs. A tensor (rows, ...) counts as an input
    whose gradient is needed, as for a penalty.

    Args:
        losses: losses with a gradient.
        outputs: outputs of the model.
        parallel_model: this rank's part of the model.
        rows: rows of the micro-batch.

    Raises:
        JobError: there are such weights; it names their shapes.
    """
    model_tensors = {id(tensor) for tensor in parallel_model.forward_parameters()}
    foreign_leaves = [
        leaf
        for leaf in _leaves(losses, outputs)
        if id(leaf) not in model_tensors
        if isinstance(leaf, nn.Parameter) or leaf.ndim == 0 or len(leaf) != rows
    ]
    if not foreign_leaves:
        return
    shapes = ", ".join(sorted({str(tuple(leaf.shape)) for leaf in foreign_leaves}))
    raise JobError(
        f"the losses depend on weights of shape {shapes} that are not part of the model, but wanma trains "
        "only weights of the model",
        f"{MOVE_INTO_MODEL_HINT}. {FREEZE_HINT}. Read weights of the model from its modules in every "
        "forward pass",
    )


def _leaves(losses: Tensor, outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors at which the graph of the losses ends, without those behind the outputs."""
    visited: set[Any] = {output.grad_fn for output in outputs if output.grad_fn is not None}
    pending: list[Any] = [losses.grad_fn]
    leaves = []
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        pending += [before for before, _ in node.next_functions]
    return leaves
