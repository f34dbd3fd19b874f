"""Error report for an exception in a user's own model or loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from wanma.job.errors import WanmaError
from wanma.job.user_frames import user_frame_text

_FRAMEWORK_FOLDERS = (Path(__file__).parents[2], Path(torch.distributed.__file__).parent)
"""Folders of code whose exceptions do not come from the model: wanma's, and torch.distributed's."""
_MAX_SHOWN_SAMPLES = 8
_MAX_MESSAGE_CHARACTERS = 300


class ForwardError(WanmaError):
    """Error that a user's model has raised in its forward, or a user's loss."""


def forward_error(
    error: Exception,
    model: nn.Module,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    sample_indices: Sequence[int],
) -> ForwardError | None:
    """Build an error that names the samples, the module that failed, and the model's inputs.

    Args:
        error: the exception.
        model: the model.
        inputs: its positional arguments.
        keywords: its keyword arguments.
        sample_indices: indices of the samples in the training data.

    Returns:
        None for an exception that is not the model's own: of wanma, of the network, or lack of memory.
    """
    if type(model).__module__.startswith("wanma.") or not is_user_error(error):
        return None
    first = ", ".join(map(str, sample_indices[:_MAX_SHOWN_SAMPLES]))
    numbers = f"{first}, ..." if len(sample_indices) > _MAX_SHOWN_SAMPLES else first
    lines = [f"the model failed on samples {numbers}: {type(error).__name__}: {_truncate(str(error))}"]
    if (inner := _innermost_failing_module(error.__traceback__, model)) is not None:
        lines.append(f"    in {inner}")
    if line := user_frame_text(error, allow_library=False):
        lines.append(f"    at {line}")
    arguments = [describe_value(value) for value in inputs]
    arguments += [f"{name}={describe_value(value)}" for name, value in keywords.items()]
    return ForwardError(
        "\n".join(lines),
        f"{type(model).__name__} was called with {', '.join(arguments) or 'nothing'}; correct the model or "
        "the samples",
    )


def is_user_error(error: BaseException) -> bool:
    """Return True if an exception came from a user's model or loss.

    It did not if it came from wanma, from communication between ranks, or for lack of memory.
    """
    if isinstance(error, ForwardError):
        return True
    if isinstance(error, WanmaError | torch.OutOfMemoryError | MemoryError):
        return False
    return not _raised_in(error.__traceback__, _FRAMEWORK_FOLDERS)


def loss_error(error: Exception, loss: object, output: Any, targets: Any) -> ForwardError | None:
    """Build the error of a loss that raised `error`: its line, and its inputs; None as of `forward_error`."""
    if isinstance(error, WanmaError | torch.OutOfMemoryError | MemoryError):
        return None
    if _raised_in(error.__traceback__, _FRAMEWORK_FOLDERS[1:]):
        return None
    name = getattr(loss, "__name__", type(loss).__name__)
    lines = [f"the loss {name} failed: {type(error).__name__}: {_truncate(str(error))}"]
    if line := user_frame_text(error, allow_library=False):
        lines.append(f"    at {line}")
    return ForwardError(
        "\n".join(lines),
        f"it was called with (output, targets): {describe_value(output)}, {describe_value(targets)}",
    )


def describe_value(value: Any) -> str:
    """Format type and shape of one argument: 'float32 [4, 5]'."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _truncate(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARACTERS else f"{message[:_MAX_MESSAGE_CHARACTERS]} ..."


def _innermost_failing_module(traceback: TracebackType | None, model: nn.Module) -> str | None:
    """Return name and description of the innermost module whose forward raised."""
    names = {id(module): name for name, module in model.named_modules()}
    description = None
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            description = f"{names[id(module)]}: {_format_module(module)}"
        traceback = traceback.tb_next
    return description


def _format_module(module: nn.Module) -> str:
    """Format a module: 'Linear(in_features=4, out_features=3, bias=True)'; with children, its class."""
    if next(module.children(), None) is not None:
        return type(module).__name__
    return f"{type(module).__name__}({module.extra_repr()})"


def _raised_in(traceback: TracebackType | None, folders: Sequence[Path]) -> bool:
    """Return True if the innermost frame is code of one of `folders`."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    file = Path(traceback.tb_frame.f_code.co_filename)
    return any(file.is_relative_to(folder) for folder in folders)
