"""A check in a user's own loop, on its first micro-batch: losses depend on no outputs of other samples.

It follows their gradient as far as the model's outputs, without a further forward or a function from a
batch to its losses. It sees nothing that no gradient goes through, which `coupling` does, and nothing within
the model, which `carried_state` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wanma.parallel.global_batch import GlobalBatch
from wanma.training.coupling import is_cut, refuse_together
from wanma.training.outputs import map_tensors
from wanma.training.trainer import Trainer


def dependence_of_outputs(trainer: Trainer, gathering: GlobalBatch) -> Dependence | None:
    """Watch what the model puts out from now on; None where any loss is that of a plain loop."""
    return Dependence(trainer, gathering) if is_cut(trainer) else None


class Dependence:
    """Outputs of the model in one micro-batch, to which the gradient of its losses is compared."""

    def __init__(self, trainer: Trainer, gathering: GlobalBatch) -> None:
        self._trainer, self._gathering = trainer, gathering
        self._outputs: list[Tensor] = []
        self._hook = trainer.state.parallel.module.register_forward_hook(self._note)

    def refuse(self, losses: Tensor) -> None:
        """Before backward; every rank calls it. Afterwards nothing is watched any more.

        Raises:
            JobError: on some rank the losses of some samples depend on others; all ranks raise it.
        """
        self._hook.remove()
        outputs, self._outputs = self._outputs, []
        refuse_together(self._trainer, not self._gathering.is_used and _couples(losses, outputs), False)

    def _note(self, module: nn.Module, arguments: Any, output: Any) -> Any:  # noqa: ARG002  # a hook's
        def note(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad or tensor.ndim == 0:
                return tensor
            # Another tensor than what is watched by the hooks that gather parameters for a backward.
            seen = tensor.view_as(tensor)
            self._outputs.append(seen)
            return seen

        return map_tensors(note, output)


def _couples(losses: Tensor, outputs: list[Tensor]) -> bool:
    """Return whether the sum of the losses is no sum of functions of the outputs' two halves.

    The gradient of a half's losses reaches the outputs of the other, and the gradient with respect to those
    depends on the first. An average that is added to each loss does only the one.
    """
    rows = len(losses)
    outputs = [output for output in outputs if len(output) == rows]
    if rows < 2 or not outputs:
        return False
    half = rows // 2
    try:
        reached = _reaches(losses[:half], outputs, slice(half, None)) or _reaches(
            losses[half:], outputs, slice(half)
        )
        if not reached:
            return False
        gradients = torch.autograd.grad(losses.sum(), outputs, create_graph=True, allow_unused=True)
        halves = [gradient[:half].flatten() for gradient in gradients if gradient is not None]
        # No constants: the rows of a softmax's derivative add up to zero.
        weighed = [half @ torch.arange(len(half), device=half.device).cos().to(half.dtype) for half in halves]
        total = torch.stack(weighed).sum()
        return total.requires_grad and _reaches(total.view(1), outputs, slice(half, None))
    except RuntimeError:  # a graph that is made to be gone through once, or has no second derivative
        return False


def _reaches(losses: Tensor, outputs: list[Tensor], rows: slice) -> bool:
    """Return whether the gradient of losses reaches some rows of the outputs."""
    gradients = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, allow_unused=True)
    others = [gradient[rows] for gradient in gradients if gradient is not None]
    return any(bool(((other != 0) & other.isfinite()).any()) for other in others)
