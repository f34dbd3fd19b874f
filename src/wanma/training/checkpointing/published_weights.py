"""Load of published weights: each rank reads the boxes that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from wanma.checkpoint.conversion.huggingface_weights import HuggingFaceWeights
from wanma.checkpoint.format.local_shards import local_box, local_tensor
from wanma.checkpoint.format.manifest import Box, intersect_boxes
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import EXIT_USAGE, WanmaError, did_you_mean, first_lines
from wanma.job.run.worker import WorkerContext
from wanma.models.config.huggingface_config import CONFIG_FILE_NAME, read_config_file
from wanma.models.state_dict.module_adapter import get_state_dict_adapter
from wanma.models.state_dict.tensor_mapping import (
    StateDictAdapter,
    TensorMapping,
    TensorSlice,
    select_mapping,
    tensor_shapes,
)
from wanma.parallel.parallelize import ParallelModel

READ_CHUNK_BYTES = 64 << 20
"""Bytes read at once, roughly: memory that a rank needs beside its own parameters."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_DIFFERENCES_IN_MESSAGE = 8


def load_huggingface_weights(parallel_model: ParallelModel, folder: Path, worker: WorkerContext) -> int:
    """Fill the parameters of `parallel_model` from the published checkpoint in `folder`; every rank calls it.

    Parameters that no published checkpoint has, such as adapters, keep their values.

    Returns:
        bytes that this rank read.

    Raises:
        WanmaError: names, shapes or settings differ; one message, the same on every rank, names them.
    """
    with HuggingFaceWeights(folder) as weights:
        mappings = [_map_weights(part, weights) for part in parallel_model.model_parts]
        _require_matching_weights(mappings, weights, parallel_model, worker)
        with torch.no_grad():
            for part, mapping in zip(parallel_model.model_parts, mappings, strict=True):
                for name, parameter in part.named_parameters():
                    if pieces := mapping.pieces.get(name):
                        box = local_box(name, parameter)
                        assert box is not None  # parameters lie on this rank's own mesh
                        load_shard(local_tensor(parameter), box, pieces, weights)
                for name, buffer in _user_buffers(part):
                    buffer.copy_(weights.read(name, (0,) * buffer.ndim, tuple(buffer.shape)))
        return weights.bytes_read


def huggingface_parameter_names(parallel_model: ParallelModel) -> set[str]:
    """Return this rank's parameters that a published checkpoint fills, and that need no initial value."""
    return {
        name
        for part in parallel_model.model_parts
        for adapter in [get_state_dict_adapter(part)]
        for name, parameter in part.named_parameters()
        if adapter.tensor_mappings(name, tuple(parameter.shape))
    }


@dataclass
class _WeightMapping:
    """Comparison of one stage's parameters with the tensors of the files."""

    pieces: dict[str, TensorMapping] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)

    @property
    def matched_tensors(self) -> set[str]:
        """Names of the files' tensors that the stage fills, or leaves alone knowingly."""
        return self.ignored | {piece.tensor_name for pieces in self.pieces.values() for piece in pieces}


def _map_weights(part: nn.Module, weights: HuggingFaceWeights) -> _WeightMapping:
    model = get_state_dict_adapter(part)
    mapping = _WeightMapping()
    if (weights.folder / CONFIG_FILE_NAME).is_file():
        config = read_config_file(weights.folder, "checkpoint.start_from")
        mapping.differences += model.config_mismatches(config)
    for name, parameter in part.named_parameters():
        alternatives = model.tensor_mappings(name, tuple(parameter.shape))
        pieces = select_mapping(alternatives, weights.files)
        if pieces is not None:
            mapping.pieces[name] = pieces
        elif alternatives:
            tensor = next(p.tensor_name for p in alternatives[0] if p.tensor_name not in weights.files)
            mapping.differences.append(f"{tensor}: missing.{did_you_mean(tensor, weights.files)}")
    for tensor, shape in tensor_shapes(mapping.pieces.values()).items():
        if weights.shape(tensor) != shape:
            mapping.differences.append(f"{tensor}: shape {shape} here, {weights.shape(tensor)} in the files")
        elif weights.dtype(tensor) not in _FLOATS:
            mapping.differences.append(
                f"{tensor}: dtype {weights.dtype(tensor)}; quantized weights are not supported"
            )
    mapping.ignored = {tensor for tensor in weights.files if model.is_ignored_tensor(tensor)}
    for name, buffer in _user_buffers(part):
        if name not in weights.files:
            mapping.differences.append(f"{name}: missing.{did_you_mean(name, weights.files)}")
        elif weights.shape(name) != tuple(buffer.shape):
            mapping.differences.append(
                f"{name}: shape {tuple(buffer.shape)} here, {weights.shape(name)} in the files"
            )
    if not mapping.differences:
        mapping.differences += _tie_conflicts(mapping, model, weights)
    return mapping


def _user_buffers(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers in the state dict of a user's module; other models need no files for theirs."""
    if hasattr(part, "tensor_mappings"):
        return []
    saved = part.state_dict().keys()
    return [(name, buffer) for name, buffer in part.named_buffers() if name in saved]


def _tie_conflicts(
    mapping: _WeightMapping, model: StateDictAdapter, weights: HuggingFaceWeights
) -> Iterator[str]:
    """Yield tensors that this model holds once, but the files hold twice and unequal."""
    for tensor, copy in model.tied_tensors:
        used = {piece.tensor_name for pieces in mapping.pieces.values() for piece in pieces}
        if not {tensor, copy} <= weights.files.keys() or not used & {tensor, copy}:
            continue
        shape = weights.shape(tensor)
        rows = max(READ_CHUNK_BYTES // (4 * max(shape[1], 1)), 1)
        boxes = [((at, 0), (min(rows, shape[0] - at), shape[1])) for at in range(0, shape[0], rows)]
        if weights.shape(copy) != shape or not all(
            torch.equal(weights.read(tensor, *box), weights.read(copy, *box)) for box in boxes
        ):
            yield f"{copy}: differs from {tensor}, but the model ties them (tie_word_embeddings)"


def _require_matching_weights(
    mappings: list[_WeightMapping],
    weights: HuggingFaceWeights,
    parallel_model: ParallelModel,
    worker: WorkerContext,
) -> None:
    differences = [difference for mapping in mappings for difference in mapping.differences]
    known = {tensor for mapping in mappings for tensor in mapping.matched_tensors}
    gathered = all_gather_objects((differences, known), worker.world_size)
    differences = list(dict.fromkeys(text for texts, _ in gathered for text in texts))
    known = {tensor for _, tensors in gathered for tensor in tensors}
    _require_no_differences(
        differences,
        known,
        weights,
        type(parallel_model.model_parts[0]).__name__,
        parallel_model.parameter_names,
    )


def check_huggingface_weights(model: nn.Module, folder: Path) -> None:
    """Compare a full model, which may be on the meta device, with the published checkpoint in `folder`.

    Raises:
        WanmaError: names, shapes or settings differ.
    """
    with HuggingFaceWeights(folder) as weights:
        mapping = _map_weights(model, weights)
        names = [name for name, _ in model.named_parameters()]
        _require_no_differences(
            mapping.differences, mapping.matched_tensors, weights, type(model).__name__, names
        )


def _require_no_differences(
    differences: Sequence[str],
    matched_tensors: Collection[str],
    weights: HuggingFaceWeights,
    model: str,
    parameter_names: Collection[str],
) -> None:
    """Refuse files that differ from the model, or hold tensors that it has no place for.

    Args:
        differences: differences between the model's parameters and the files.
        matched_tensors: tensors of the files that the model has a place for.
        weights: the files.
        model: name of the model's class.
        parameter_names: names of the model's parameters.
    """
    folder = weights.folder
    extra = sorted(weights.files.keys() - set(matched_tensors))
    differences = [*differences, *(f"{tensor}: not in this model" for tensor in extra)]
    if differences:
        way_out = f"set the published model in the job: model.huggingface = '{folder}'"
        if weights.files.keys() >= set(parameter_names):
            way_out = (
                "the tensors have wanma's parameter names (`wanma checkpoint convert --format "
                "safetensors`): set checkpoint.start_from to the checkpoint itself, or to the output of "
                "`wanma checkpoint convert --weights`"
            )
        raise WanmaError(
            f"checkpoint.start_from = '{folder}' does not match the model {model} of the job:\n    "
            + first_lines(differences, _MAX_DIFFERENCES_IN_MESSAGE),
            way_out,
            EXIT_USAGE,
        )


def load_shard(local: Tensor, box: Box, alternative: TensorMapping, weights: HuggingFaceWeights) -> None:
    """Copy the file's content into `local`, which is `box` of one parameter, some rows at a time."""
    if not alternative[0].shape:  # a parameter that is one number
        local.copy_(weights.read(alternative[0].tensor_name, (), ()))
        return
    for piece in alternative:
        begin = (piece.first_row, *(0 for _ in piece.shape[1:]))
        common = intersect_boxes(box, Box(begin, piece.shape))
        if common is None:
            continue
        local_slices, piece_slices = common
        for rows in _row_chunks(piece_slices[0], piece):
            offset = (rows.start, *(cut.start for cut in piece_slices[1:]))
            shape = (len(rows), *(cut.stop - cut.start for cut in piece_slices[1:]))
            start = local_slices[0].start + rows.start - piece_slices[0].start
            target = local[(slice(start, start + len(rows)), *local_slices[1:])]
            # Not kept under a name, which would hold it while the next is read.
            target.copy_(
                piece.from_huggingface(
                    offset, shape, weights.read(piece.tensor_name, *piece.locate_box(offset, shape))
                )
            )


def _row_chunks(rows: slice, piece: TensorSlice) -> Iterator[range]:
    """Yield ranges of rows of about `READ_CHUNK_BYTES` each; complete heads where heads are permuted."""
    row_bytes = 4 * max(torch.Size(piece.shape[1:]).numel(), 1)
    step = max(READ_CHUNK_BYTES // row_bytes, 1)
    if piece.head_dim is not None:
        step = max(step // piece.head_dim, 1) * piece.head_dim
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))
