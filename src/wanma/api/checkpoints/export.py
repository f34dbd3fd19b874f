"""Export of a trained model for other libraries: safetensors and config.json, tensor by tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.api.checkpoints.unrounded_weights import UnroundedWeights
    from wanma.checkpoint.format.manifest import Box
    from wanma.checkpoint.load.reader import CheckpointReader
    from wanma.models.state_dict.tensor_mapping import StateDictAdapter, TensorSlice

FILE_BYTES = 5_000_000_000
"""Maximum tensor bytes in one file, as in transformers."""
PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_HALF_DTYPES = ("BF16", "F16")
_TORCH_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class ExportResult:
    """Result of an export."""

    folder: Path
    checkpoint: Path
    tensors: int
    is_averaged: bool
    """True if the averaged weights were exported, which a run has with train.weight_average."""
    has_byte_tokenizer: bool
    """True if a tokenizer was made whose token ids are the bytes: the run had none and read bytes."""
    rounded_parameters: int = 0
    """Frozen parameters exported in more bits than the checkpoint holds: their source no longer exists."""


def export(
    run: RunDirectory,
    folder: Path,
    *,
    checkpoint: Path | None = None,
    step: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    file_bytes: int = FILE_BYTES,
    on_message: Callable[[str], None] = warnings.warn,
) -> ExportResult:
    """Export a complete checkpoint of `run` as a folder that transformers' `from_pretrained` loads.

    Memory holds one tensor at a time. Averaged weights are preferred, as in `wanma sample`; adapters are
    merged into their weights. Frozen weights that the checkpoint holds in 16 bits are read from the start of
    the run (`checkpoint.start_from`), as long as it exists.

    Args:
        folder: output folder; it is created, and must be empty.
        checkpoint: checkpoint to export; None: one of the run's.
        step: step of the run's checkpoint; None: the newest complete one.
        precision: precision of the exported weights; None: that of the trained ones.
        on_message: receives the reason if damage makes the export use an older checkpoint than the newest.

    Raises:
        WanmaError: the run has no such checkpoint, or it is damaged, its model has no published form, or
            the folder is in use.
    """
    import torch

    from wanma.api.checkpoints.unrounded_weights import open_start_weights
    from wanma.checkpoint.conversion.conversion import require_valid
    from wanma.checkpoint.conversion.huggingface_weights import write_huggingface_weights
    from wanma.checkpoint.format.local_shards import DTYPES
    from wanma.checkpoint.load.reader import CheckpointReader
    from wanma.checkpoint.load.verification import find_valid
    from wanma.models.model_spec import resolve_model_spec
    from wanma.models.state_dict.tensor_mapping import tensor_shapes

    job = load_recorded_job(run.job)
    if checkpoint is not None:
        require_valid(checkpoint)
    path = checkpoint or find_valid(run.checkpoints, step, on_message)
    run_copy = run.path / "tokenizer"
    # A user's own dataset holds tokens: the job's tokenizer was not used by the run.
    reads_text = run_copy.is_dir() or job.data.has_text
    tokenizer = load_tokenizer(run_copy if run_copy.is_dir() else job.data.tokenizer) if reads_text else None
    vocabulary = tokenizer.vocabulary_size if tokenizer is not None else None
    length = job.data.sequence_length
    spec = resolve_model_spec(
        job.model, vocabulary_size=vocabulary, sequence_length=length, image_shape=None, classes=None
    )
    with torch.device("meta"):
        model = spec.build_module()
    if not hasattr(model, "tensor_mappings"):
        raise WanmaError(
            f"{run.path} trained {spec.name}, which has no Hugging Face format",
            "write the tensors of others by `wanma checkpoint convert RUN OUT --format safetensors`",
        )
    saved = CheckpointReader(path)
    averaged = any(name.startswith("average.") for name in saved.tensors)
    holders = _slices_by_tensor(model, saved)
    shapes = tensor_shapes([tuple(piece for _, piece in tensor_slices) for tensor_slices in holders.values()])
    kinds = {
        name: PRECISIONS[precision] if precision else _export_dtype(saved, tensor_slices)
        for name, tensor_slices in holders.items()
    }
    config = cast("StateDictAdapter", model).export_config(length)
    config["dtype"] = _TORCH_DTYPE_NAMES[next(iter(kinds.values()))]
    other_files = _other_files(config, tokenizer if run_copy.is_dir() else None)
    with open_start_weights(model, job.checkpoint.start_from) as start:
        weights = _TensorAssembler(saved, holders, job.model.lora_alpha, start)
        write_huggingface_weights(
            folder,
            {name: (kinds[name], shape) for name, shape in shapes.items()},
            lambda name: weights.assemble(name, shapes[name], DTYPES[kinds[name]]),
            other_files,
            file_bytes,
        )
    made_tokenizer = run_copy.is_dir() and isinstance(tokenizer, BytesTokenizer)
    return ExportResult(folder, path, len(shapes), averaged, made_tokenizer, len(weights.rounded))


def _other_files(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files beside the weights: the config, and a tokenizer that the run keeps."""
    if tokenizer is None:
        return {"config.json": json.dumps(config, indent=2, sort_keys=True).encode()}
    ends = config.get("eos_token_id")
    if tokenizer.end_of_document_id not in (ends if isinstance(ends, list) else [ends]):
        config["eos_token_id"] = tokenizer.end_of_document_id  # the one that the model has learned to write
    text = json.dumps(config, indent=2, sort_keys=True).encode()
    return {"config.json": text, **_tokenizer_files(tokenizer)}


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the tokenizer's files in the form that transformers' `AutoTokenizer` loads."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.end_of_document,
    }
    if isinstance(tokenizer, BytesTokenizer):
        settings |= {"clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer.to_huggingface_json().encode(),
        "tokenizer_config.json": json.dumps(settings).encode() + b"\n",
    }


_SlicesByTensor = dict[str, list[tuple[str, "TensorSlice"]]]
"""Pieces of each published tensor: its name -> (name in the checkpoint, piece)."""


@dataclass
class _TensorAssembler:
    """Assembly of published tensors from pieces of saved ones."""

    reader: CheckpointReader
    slices_by_tensor: _SlicesByTensor
    lora_alpha: float
    start_weights: UnroundedWeights
    rounded: set[str] = field(default_factory=set)
    """Names of parameters exported in more bits than were found of them."""

    def assemble(self, tensor: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        import torch

        from wanma.checkpoint.format.manifest import Box

        full_tensor = torch.empty(shape, dtype=dtype)
        for name, piece in self.slices_by_tensor[tensor]:
            part = self._read_box(
                name, Box((piece.first_row, *(0 for _ in piece.shape[1:])), piece.shape), dtype
            )
            part = self._merge_lora(name, part)
            ends = (at + size for at, size in zip(piece.offset, piece.tensor_shape, strict=True))
            full_tensor[tuple(map(slice, piece.offset, ends))] = piece.to_huggingface(part).to(dtype)
        return full_tensor

    def _read_box(self, name: str, box: Box, dtype: Any) -> Tensor:
        part = self.reader.read(name, box)
        if self.reader.tensors[name].dtype not in _HALF_DTYPES or _widest_dtype(self.reader) in _HALF_DTYPES:
            return part
        unrounded = self.start_weights.read_unrounded(
            name.removeprefix("model."), part, box, self.reader.tensors[name].shape
        )
        if unrounded is part and dtype.itemsize > part.dtype.itemsize:
            self.rounded.add(name)
        return unrounded

    def _merge_lora(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, with the adapter of its layer merged if there is one."""
        path, _, kind = name.partition(".")[2].rpartition(".")
        halves = {part: f"{path}.{part}" if path else part for part in ("lora_a", "lora_b")}
        if kind != "weight" or f"model.{halves['lora_a']}" not in self.reader.tensors:
            return weight
        from wanma.models.layers.lora import merge_lora

        read = {
            part: self.reader.read(_saved_name(self.reader, half_name)) for part, half_name in halves.items()
        }
        return merge_lora({"weight": weight, **read}, self.lora_alpha)["weight"]


def _slices_by_tensor(model: nn.Module, reader: CheckpointReader) -> _SlicesByTensor:
    from wanma.models.layers.lora import is_lora_parameter

    holders: _SlicesByTensor = {}
    for name, parameter in model.named_parameters():
        if is_lora_parameter(name):
            continue
        alternatives = cast("StateDictAdapter", model).tensor_mappings(name, tuple(parameter.shape))
        if not alternatives:
            raise WanmaError(f"parameter {name} has no counterpart in the Hugging Face format")
        saved_name = _saved_name(reader, name)
        entry = reader.tensors.get(saved_name)
        if entry is None or entry.shape != tuple(parameter.shape):
            raise WanmaError(
                f"{reader.name} is not a checkpoint of the model in job.toml: {name}",
                "restore the job.toml of the run",
            )
        for piece in alternatives[0]:
            holders.setdefault(piece.tensor_name, []).append((saved_name, piece))
    return holders


def _saved_name(reader: CheckpointReader, parameter: str) -> str:
    """Return the checkpoint's name of a parameter's average, or of the parameter itself if it has none.

    Frozen parameters have no average.
    """
    average = f"average.{parameter}"
    return average if average in reader.tensors else f"model.{parameter}"


def _export_dtype(reader: CheckpointReader, slices: list[tuple[str, TensorSlice]]) -> str:
    saved_dtype = reader.tensors[slices[0][0]].dtype
    return _widest_dtype(reader) if saved_dtype in _HALF_DTYPES else saved_dtype


def _widest_dtype(reader: CheckpointReader) -> str:
    """Return the dtype with the most bits among the weights, which is that of the trained ones."""
    dtypes = {entry.dtype for name, entry in reader.tensors.items() if name.startswith("model.")}
    return next((dtype for dtype in _TORCH_DTYPE_NAMES if dtype in dtypes), "F32")
