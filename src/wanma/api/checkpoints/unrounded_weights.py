"""Frozen weights before their rounding to 16 bits, read from the start of a run while it exists.

A checkpoint of a run with adapters in bf16 holds the weights on which the run computed. Weights that were
published in fp32 had more bits. Source weights that round to the saved values are those from which the run
started.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from wanma.checkpoint.conversion.huggingface_weights import HuggingFaceWeights, has_huggingface_weights
from wanma.checkpoint.format.local_shards import DTYPES
from wanma.checkpoint.format.manifest import Box
from wanma.checkpoint.load.reader import CheckpointReader
from wanma.job.errors import WanmaError
from wanma.models.state_dict.tensor_mapping import StateDictAdapter, select_mapping, tensor_shapes
from wanma.training.checkpointing.published_weights import load_shard


class UnroundedWeights:
    """Weights from which a run has started.

    Args:
        model: model of the run, on any device.
        source: source of the weights; None: it does not exist.
    """

    def __init__(self, model: nn.Module, source: HuggingFaceWeights | CheckpointReader | None) -> None:
        self._model, self._source = cast(StateDictAdapter, model), source
        self.unresolved: set[str] = set()
        """Names of parameters for which only the rounded values were found."""

    def read_unrounded(self, name: str, rounded: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
        """Return a box of parameter `name` in fp32 that rounds to `rounded`; else `rounded` itself.

        Args:
            shape: shape of the full parameter.
        """
        try:
            unrounded = self._read(name, box, shape)
        except WanmaError:
            unrounded = None  # the source was damaged since the run began
        if unrounded is not None and torch.equal(unrounded.to(rounded.dtype), rounded):
            return unrounded
        self.unresolved.add(name)
        return rounded

    def _read(self, name: str, box: Box, shape: tuple[int, ...]) -> Tensor | None:
        if isinstance(self._source, CheckpointReader):
            entry = self._source.tensors.get(f"model.{name}")
            if entry is None or entry.shape != shape or not DTYPES[entry.dtype].is_floating_point:
                return None
            return self._source.read(f"model.{name}", box).float()
        if self._source is None:
            return None
        pieces = select_mapping(self._model.tensor_mappings(name, shape), self._source.files)
        if pieces is None:
            return None
        for tensor, min_shape in tensor_shapes([pieces]).items():  # a fused tensor may hold more
            file_shape = self._source.shape(tensor)
            if len(file_shape) != len(min_shape) or any(
                size < min_size for size, min_size in zip(file_shape, min_shape, strict=True)
            ):
                return None
        values = torch.empty(box.shape)
        load_shard(values, box, pieces, self._source)
        return values


@contextmanager
def open_start_weights(model: nn.Module, start: str | None) -> Iterator[UnroundedWeights]:
    """Open the source named by `checkpoint.start_from`, if it exists."""
    path = Path(start).expanduser() if start is not None else None
    source: HuggingFaceWeights | CheckpointReader | None = None
    try:
        if path is not None and has_huggingface_weights(path):
            source = HuggingFaceWeights(path)
        elif path is not None and path.is_dir():
            source = CheckpointReader(path)
    except (WanmaError, OSError):
        source = None
    if isinstance(source, HuggingFaceWeights):
        with source:
            yield UnroundedWeights(model, source)
    else:
        yield UnroundedWeights(model, source)
