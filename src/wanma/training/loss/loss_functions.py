"""Losses as sums with their target counts, so that only the global batch divides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wanma.data.batch import IGNORE_INDEX, Batch
from wanma.job.errors import WanmaError
from wanma.models.user_modules.forward_error import loss_error
from wanma.models.user_modules.label_task import LABEL_KEYS
from wanma.torch_internals.loaded import DTensor
from wanma.training.loss.cross_entropy import cross_entropy_sum
from wanma.training.loss.target_counting import Losses, TargetCounter, UserLoss

LossFunction = Callable[[Any, Batch], tuple[Tensor, Tensor]]
"""Function (model output, batch) -> (sum of the losses of real targets, their number)."""


@dataclass(frozen=True)
class CrossEntropy:
    """Cross entropy: the loss of text, labelled images, and by default of a user's own data."""

    overwrite_logits: bool = False
    """True if the logits may be overwritten in backward, as in `cross_entropy_sum`."""
    classes_last: bool = False
    """True if logits are known to be (..., classes).

    Otherwise those of more than two dims may also be (rows, classes, ...), as torch has them: the targets'
    shape decides, or they are refused.
    """

    def __call__(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of real targets, and their number.

        Raises:
            WanmaError: the output has no logits, logits that do not fit the targets, or targets that are no
                classes of theirs.
        """
        loss = self.sum(self._logits(output, batch), batch.wide_targets, class_range([batch]))
        return loss, (batch.wide_targets != IGNORE_INDEX).sum()

    def losses(self, output: Any, batch: Batch) -> Losses:
        """Return one loss per target, and a mask of the targets that count."""
        classes = batch.wide_targets
        arranged = self._checked_logits(self._logits(output, batch), classes, class_range([batch]))
        precise = arranged.to(torch.promote_types(arranged.dtype, torch.float32))
        losses = F.cross_entropy(
            precise.flatten(0, -2), classes.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        return losses.view(classes.shape), classes != IGNORE_INDEX

    def sum(self, logits: Tensor, targets: Tensor, classes: tuple[int, int] | None = None) -> Tensor:
        """Return the sum of the losses of targets that are not `IGNORE_INDEX`.

        Args:
            logits: logits of the model.
            targets: classes, int64.
            classes: smallest and largest class of the targets, if known.
        """
        return cross_entropy_sum(
            self._checked_logits(logits, targets, classes),
            targets,
            overwrite_logits=self.overwrite_logits,
        )

    def _logits(self, output: Any, batch: Batch) -> Tensor:
        require_single_target(
            batch,
            "cross entropy, the default loss,",
            "pass a custom loss that takes the dict: loss= of wanma.train",
        )
        logits = logits_of(output)
        if not self.classes_last and logits is not output and logits.ndim > 2:
            _refuse_unknown_labels(output, batch)
        return logits

    def _checked_logits(self, logits: Tensor, targets: Tensor, classes: tuple[int, int] | None) -> Tensor:
        """Return logits (..., classes) that fit the targets."""
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise WanmaError(
                f"the targets are {targets.dtype}, but cross entropy, the default loss, needs integer "
                "classes",
                "use integer targets, or a custom loss: loss= of wanma.train, model.loss of a job, losses of "
                "your own in wanma.session",
            )
        arranged = self._with_classes_last(logits, targets)
        if classes is not None and not 0 <= classes[0] <= classes[1] < arranged.shape[-1]:
            invalid_class = classes[0] if classes[0] < 0 else classes[1]
            raise WanmaError(
                f"a target is class {invalid_class}, but the model has {arranged.shape[-1]} classes: 0 to "
                f"{arranged.shape[-1] - 1}",
                f"fix the data or the model; targets of {IGNORE_INDEX} are ignored, and whole numbers of "
                "a table are classes without data.columns.target_type = 'number'",
            )
        return arranged

    def _with_classes_last(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return logits (..., classes) of logits that may be (rows, classes, ...)."""
        shape = tuple(logits.shape)
        last = shape[:-1] == tuple(targets.shape)
        second = not self.classes_last and len(shape) > 2 and shape[:1] + shape[2:] == tuple(targets.shape)
        if last and second:
            raise WanmaError(
                f"logits of shape {shape} for targets of shape {tuple(targets.shape)} are ambiguous: "
                "classes can be in dim 1 (as in torch's cross entropy) or in the last dim (as in "
                "language models)",
                "pass a loss: loss=torch.nn.CrossEntropyLoss(reduction='none') for dim 1; for the last "
                "dim loss=lambda logits, targets: F.cross_entropy(logits.movedim(-1, 1), targets, "
                "reduction='none')",
            )
        if not last and not second:
            raise WanmaError(
                f"the model returns logits of shape {shape} for targets of shape {tuple(targets.shape)}, "
                "but cross entropy, the default loss, takes (..., classes) for (...), or (rows, classes, "
                "...) for (rows, ...)",
                "fix the shapes, or use a custom loss: loss= of wanma.train, model.loss of a job; whole "
                "numbers of a table are classes without data.columns.target_type = 'number'",
            )
        return logits if last else logits.movedim(1, -1)


def squared_error(output: Any, targets: Tensor) -> Tensor:
    """Return one squared error per target: the loss of tables whose target is a number.

    Args:
        output: model output, or an object with `logits`, (rows,) or (rows, 1).
        targets: numbers (rows,).

    Raises:
        WanmaError: the output has another shape, which would be broadcast.
    """
    numbers = logits_of(output)
    if tuple(numbers.shape) not in (tuple(targets.shape), (*targets.shape, 1)):
        raise WanmaError(
            f"the model returns shape {tuple(numbers.shape)} for targets of shape {tuple(targets.shape)}, "
            "but the target column is a number, whose loss is the squared error of one output per row",
            "return (rows,) or (rows, 1), set data.columns.target_type = 'class', or set model.loss",
        )
    precise = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    return (precise.reshape(targets.shape) - targets).square()


def class_range(batches: Iterable[Batch]) -> tuple[int, int] | None:
    """Return the smallest and largest class among the targets of some batches; None where none is known."""
    known = [batch.class_range for batch in batches if batch.class_range is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def logits_of(output: Any) -> Tensor:
    """Return a model's logits: its output, or its `logits`, as in models of transformers.

    Raises:
        WanmaError: the output has no logits.
    """
    logits = _logits(output)
    if logits is None:
        raise WanmaError(
            f"the model returns {_described(output)}, which has no logits for cross entropy, the default "
            "loss",
            "return a tensor, or an object or dict with `logits`; or use a custom loss, which takes the "
            "output unchanged: loss= of wanma.train, model.loss of a job",
        )
    return logits


def correct_count(output: Any, targets: Tensor) -> Tensor | int:
    """Return the number of samples whose largest logit is that of their class; 0 without classes."""
    logits = _logits(full_output(output))
    if targets.ndim != 1 or targets.is_floating_point() or logits is None or logits.ndim != 2:
        return 0
    return (full_output(logits).argmax(dim=-1) == targets).sum() if len(logits) == len(targets) else 0


def wrap_user_loss(function: UserLoss, *, is_per_position: bool = False) -> LossFunction:
    """Wrap a user's per-target loss, so that padding rows count nothing.

    Args:
        function: user's loss.
        is_per_position: true if ranks share each sample's sequence, so that losses must be those of single
            positions.
    """
    count = TargetCounter(function)

    def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        gathered_output = full_output(output)
        if is_per_position:
            require_single_target(batch, "parallel.cp", "set parallel.cp = 1")
        try:
            losses = function(gathered_output, batch.given_targets)
        except Exception as error:
            if batch.named_targets is not None:
                raise
            if (user_error := loss_error(error, function, gathered_output, batch.targets)) is None:
                raise
            raise user_error from error
        unweighted = losses[0] if isinstance(losses, tuple) and losses else losses
        if isinstance(gathered_output, Tensor) and isinstance(unweighted, Tensor):
            _refuse_broadcast_samples(gathered_output, batch, unweighted)
        if (
            is_per_position
            and isinstance(unweighted, Tensor)
            and unweighted.shape[:2] != batch.targets.shape[:2]
        ):
            raise WanmaError(
                f"the loss has shape {tuple(unweighted.shape)} for targets of {tuple(batch.targets.shape)}, "
                "but under parallel.cp a rank holds a part of each sequence and computes only the losses "
                "of its positions",
                "return one loss per position, or set parallel.cp = 1",
            )
        return count(losses, batch)

    return loss


def _refuse_broadcast_samples(output: Tensor, batch: Batch, losses: Tensor) -> None:
    """Refuse losses of outputs with the targets of other samples: (rows, 1) and (rows,) make (rows, rows)."""
    shapes, result = (tuple(output.shape), tuple(batch.targets.shape)), tuple(losses.shape)
    if batch.named_targets is not None or len(shapes[0]) == len(shapes[1]) or result in shapes:
        return
    try:
        is_broadcast = result == tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:  # the loss does not compute element by element
        return
    if is_broadcast:
        raise WanmaError(
            f"the loss has shape {result}: the output {shapes[0]} and the targets {shapes[1]} are broadcast, "
            "so that outputs are compared with the targets of other samples",
            "return an output of the shape of the targets, such as output.squeeze(-1)",
        )


def require_single_target(batch: Batch, feature: str, hint: str) -> None:
    """Refuse samples whose target is a dict.

    Args:
        batch: batch of samples.
        feature: name of the feature that takes one tensor.
        hint: advice for the user.

    Raises:
        WanmaError: it names the keys.
    """
    if batch.named_targets is not None:
        raise WanmaError(
            f"the samples' target is a dict of {', '.join(batch.named_targets)}, but {feature} takes one "
            "tensor",
            hint,
        )


def full_output(output: Any) -> Any:
    """Gather logits that are split over the vocabulary, for code that knows no ranks; return others as is."""
    return output.full_tensor() if isinstance(output, DTensor) else output


def _refuse_unknown_labels(output: Any, batch: Batch) -> None:
    """Refuse labels of a module that wraps a transformers model: it is unknown whether they are shifted."""
    of_transformers = any(kind.__name__ == "ModelOutput" for kind in type(output).__mro__)
    if of_transformers and batch.target_key in LABEL_KEYS:
        raise WanmaError(
            f"the model is not a class of transformers and returns a {type(output).__name__}: wanma "
            f"cannot see whether its {batch.target_key} belong to their own position or to the position "
            "before",
            "train the transformers model itself; or rename the key to `target`, if targets belong to "
            "their own position; or use a custom loss",
        )


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _described(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}" + (f" of {len(output)}" if isinstance(output, tuple | list) else "")
