"""Error feedback of compressed gradients in checkpoints, redistributed where the number of ranks changes.

A checkpoint holds, for each parameter whose method keeps errors, a tensor of one row per rank that took part
(`parallel/gradients/gradient_compression.py`). Where as many ranks take part again it is loaded like other
state, and the run continues bit for bit. Else the sum over the rows, which is all that the model is still
owed, is divided among the new ranks. PowerSGD's matrices Q are initial values of an iteration: of another
shape they are initialized again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_box, local_tensor
from wanma.checkpoint.format.manifest import Box, TensorEntry
from wanma.checkpoint.load.reader import CheckpointReader, CheckpointSource
from wanma.job.errors import JobError, did_you_mean, first_names
from wanma.job.plan.plan import Plan
from wanma.parallel.gradients.gradient_compression import ERROR_KIND
from wanma.training.checkpointing.training_state import COMPRESSION_PREFIX

_ERRORS = f"{COMPRESSION_PREFIX}{ERROR_KIND}."
_ANY_ROWS = 1 << 30
_MAX_NAMES_IN_MESSAGE = 3
"""Largest number of parameters named in one message."""


def check_compression_patterns(names: Iterable[str], plan: Plan) -> None:
    """Refuse a pattern of `parallel.compression_groups` that matches no parameter of the full model.

    Raises:
        JobError: names the pattern.
    """
    names = list(names)
    for index, (pattern, _) in enumerate(plan.compression_groups):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise JobError(
                f"parallel.compression_groups[{index}].match = '{pattern}' matches no parameter."
                f"{did_you_mean(pattern, names)}",
                f"parameters are named like '{names[0]}'" if names else "",
            )


def split_compression_state(
    tensors: Mapping[str, Tensor], source: CheckpointSource, names_on_other_ranks: Collection[str]
) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Separate tensors that can be loaded as they were saved from those that cannot.

    Args:
        tensors: all tensors that this rank is to fill.
        source: checkpoint to load.
        names_on_other_ranks: names that only other ranks hold.

    Returns:
        the tensors to load; saved names that are none of these; and messages for the user.
    """
    saved = source.manifest.tensors
    loadable = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(COMPRESSION_PREFIX)
        or (name in saved and saved[name].shape == tuple(tensor.shape))
    }
    unloadable = [name for name in saved if name.startswith(COMPRESSION_PREFIX) and name not in loadable]
    errors = [name for name in unloadable if name.startswith(_ERRORS) and name not in names_on_other_ranks]
    shared = [
        name for name in errors if name in tensors and _is_of_same_parameter(saved[name], tensors[name])
    ]
    dropped = [name.removeprefix(_ERRORS) for name in errors if name not in shared]
    notes = []
    if shared:
        before, now = saved[shared[0]].shape[0], tensors[shared[0]].shape[0]
        notes.append(f"gradient compression: error feedback of {before} ranks redistributed to {now} ranks")
    if dropped:
        notes.append(
            f"gradient compression: error feedback of {first_names(dropped, _MAX_NAMES_IN_MESSAGE)} "
            "is dropped: the compression of these parameters no longer keeps any"
        )
    return loadable, unloadable, notes


def redistribute_error_feedback(tensors: Mapping[str, Tensor], source: CheckpointSource) -> None:
    """Give each row of these tensors its share of the sum of the saved rows.

    Args:
        tensors: tensors that were saved in another shape.
        source: checkpoint to load.

    Raises:
        WanmaError: the source is damaged.
    """
    saved = CheckpointReader(source)
    for name, tensor in tensors.items():
        entry = saved.tensors[name]
        box = local_box(name, tensor)
        if not name.startswith(_ERRORS) or box is None or not _is_of_same_parameter(entry, tensor):
            continue
        local = local_tensor(tensor)
        with torch.no_grad():
            local.zero_()
            for row in range(entry.shape[0]):
                part = Box((row, *box.offset[1:]), (1, *box.shape[1:]))
                local.add_(saved.read(name, part).to(local.device))
            local.div_(tensor.shape[0])


def with_error_rows_of_all_ranks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with errors as meta tensors of all ranks' rows, to find a rank's needs of a state."""
    return {
        name: torch.empty(_ANY_ROWS, *tensor.shape[1:], device="meta") if name.startswith(_ERRORS) else tensor
        for name, tensor in tensors.items()
    }


def _is_of_same_parameter(entry: TensorEntry, tensor: Tensor) -> bool:
    return entry.shape[1:] == tuple(tensor.shape[1:])
