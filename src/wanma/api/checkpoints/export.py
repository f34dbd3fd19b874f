"""Export of a trained model for other libraries: safetensors and config.json, tensor by tensor."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from wanma.data.text.tokenizer import END_OF_BYTES, BytesTokenizer, Tokenizer, load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.api.checkpoints.unrounded_weights import Unrounded
    from wanma.checkpoint.format.manifest import Box
    from wanma.checkpoint.load.reader import Saved
    from wanma.models.state_dict.tensor_mapping import Piece, Published

FILE_BYTES = 5_000_000_000
"""Maximum tensor bytes in one file, as in transformers."""
PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_LOW = ("BF16", "F16")
_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    folder: Path
    checkpoint: Path
    tensors: int
    averaged: bool
    """True if the averaged weights were exported, which a run has with train.weight_average."""
    made_tokenizer: bool
    """True if a tokenizer was made whose token ids are the bytes: the run had none and read bytes."""
    rounded: int = 0
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
) -> Exported:
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

    from wanma.api.checkpoints.unrounded_weights import open_start
    from wanma.checkpoint.conversion.conversion import require_whole
    from wanma.checkpoint.conversion.huggingface_weights import write_published
    from wanma.checkpoint.format.local_shards import DTYPES
    from wanma.checkpoint.load.reader import Saved
    from wanma.checkpoint.load.verification import find_whole
    from wanma.models.model_spec import model_spec
    from wanma.models.state_dict.tensor_mapping import published_shapes

    job = load_recorded_job(run.job)
    if checkpoint is not None:
        require_whole(checkpoint)
    path = checkpoint or find_whole(run.checkpoints, step, on_message)
    kept = run.path / "tokenizer"
    # A user's own dataset holds tokens: the job's tokenizer was not used by the run.
    reads_text = kept.is_dir() or bool(job.data.text or job.data.sources)
    tokenizer = load_tokenizer(kept if kept.is_dir() else job.data.tokenizer) if reads_text else None
    vocabulary = tokenizer.vocabulary if tokenizer is not None else None
    length = job.data.sequence_length
    spec = model_spec(
        job.model, vocabulary=vocabulary, sequence_length=length, image_shape=None, classes=None
    )
    with torch.device("meta"):
        model = spec.make()
    if not hasattr(model, "published"):
        raise WanmaError(
            f"{run.path} trained {spec.name}, which has no published form",
            "export works for decoders and for Hugging Face models; result.weights() gives the tensors",
        )
    saved = Saved(path)
    averaged = any(name.startswith("average.") for name in saved.tensors)
    holders = _holders(model, saved)
    shapes = published_shapes([tuple(piece for _, piece in held) for held in holders.values()])
    kinds = {
        name: PRECISIONS[precision] if precision else _dtype(saved, held) for name, held in holders.items()
    }
    config = cast("Published", model).published_config(length)
    config["dtype"] = _NAMES[next(iter(kinds.values()))]
    others = _other_files(config, tokenizer if kept.is_dir() else None)
    with open_start(model, job.checkpoint.start_from) as start:
        weights = _Weights(saved, holders, job.model.lora_alpha, start)
        write_published(
            folder,
            {name: (kinds[name], shape) for name, shape in shapes.items()},
            lambda name: weights.assemble(name, shapes[name], DTYPES[kinds[name]]),
            others,
            file_bytes,
        )
    made_tokenizer = kept.is_dir() and isinstance(tokenizer, BytesTokenizer)
    return Exported(folder, path, len(shapes), averaged, made_tokenizer, len(weights.rounded))


def _other_files(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files beside the weights: the config, and a tokenizer that the run keeps."""
    if tokenizer is None:
        return {"config.json": json.dumps(config, indent=2, sort_keys=True).encode()}
    if config.get("eos_token_id") is None:
        config["eos_token_id"] = tokenizer.end_of_document
    text = json.dumps(config, indent=2, sort_keys=True).encode()
    return {"config.json": text, **_tokenizer_files(tokenizer)}


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the tokenizer's files in the form that transformers' `AutoTokenizer` loads."""
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(tokenizer, BytesTokenizer):
        settings |= {"eos_token": END_OF_BYTES, "clean_up_tokenization_spaces": False}
    return {
        "tokenizer.json": tokenizer.published().encode(),
        "tokenizer_config.json": json.dumps(settings).encode() + b"\n",
    }


_Holders = dict[str, list[tuple[str, "Piece"]]]
"""Pieces of each published tensor: its name -> (name in the checkpoint, piece)."""


@dataclass
class _Weights:
    """Assembly of published tensors from pieces of saved ones."""

    saved: Saved
    holders: _Holders
    lora_alpha: float
    start: Unrounded
    rounded: set[str] = field(default_factory=set)
    """Names of parameters exported in more bits than were found of them."""

    def assemble(self, tensor: str, shape: tuple[int, ...], dtype: Any) -> Tensor:
        import torch

        from wanma.checkpoint.format.manifest import Box

        whole = torch.empty(shape, dtype=dtype)
        for name, piece in self.holders[tensor]:
            part = self._part(name, Box((piece.first, *(0 for _ in piece.shape[1:])), piece.shape), dtype)
            part = self._adapted(name, part)
            ends = (at + size for at, size in zip(piece.offset, piece.published_shape, strict=True))
            whole[tuple(map(slice, piece.offset, ends))] = piece.to_published(part).to(dtype)
        return whole

    def _part(self, name: str, box: Box, dtype: Any) -> Tensor:
        part = self.saved.read(name, box)
        if self.saved.tensors[name].dtype not in _LOW or _widest(self.saved) in _LOW:
            return part
        found = self.start.part(name.removeprefix("model."), part, box, self.saved.tensors[name].shape)
        if found is part and dtype.itemsize > part.dtype.itemsize:
            self.rounded.add(name)
        return found

    def _adapted(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, with the adapter of its layer merged if there is one."""
        path, _, kind = name.partition(".")[2].rpartition(".")
        halves = {part: f"{path}.{part}" if path else part for part in ("lora_a", "lora_b")}
        if kind != "weight" or f"model.{halves['lora_a']}" not in self.saved.tensors:
            return weight
        from wanma.models.layers.lora import merge

        read = {part: self.saved.read(_saved_name(self.saved, own)) for part, own in halves.items()}
        return merge({"weight": weight, **read}, self.lora_alpha)["weight"]


def _holders(model: nn.Module, saved: Saved) -> _Holders:
    from wanma.models.layers.lora import is_adapter

    holders: _Holders = {}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        alternatives = cast("Published", model).published(name, tuple(parameter.shape))
        if not alternatives:
            raise WanmaError(f"parameter {name} has no place in a published checkpoint")
        own = _saved_name(saved, name)
        entry = saved.tensors.get(own)
        if entry is None or entry.shape != tuple(parameter.shape):
            raise WanmaError(
                f"{saved.name} is of another model than its job.toml describes: {name}",
                "put back the job.toml that the run was trained with",
            )
        for piece in alternatives[0]:
            holders.setdefault(piece.tensor, []).append((own, piece))
    return holders


def _saved_name(saved: Saved, parameter: str) -> str:
    """Return the checkpoint's name of a parameter's average, or of the parameter itself if it has none.

    Frozen parameters have no average.
    """
    average = f"average.{parameter}"
    return average if average in saved.tensors else f"model.{parameter}"


def _dtype(saved: Saved, held: list[tuple[str, Piece]]) -> str:
    own = saved.tensors[held[0][0]].dtype
    return _widest(saved) if own in _LOW else own


def _widest(saved: Saved) -> str:
    """Return the dtype with the most bits among the weights, which is that of the trained ones."""
    found = {entry.dtype for name, entry in saved.tensors.items() if name.startswith("model.")}
    return next((dtype for dtype in _NAMES if dtype in found), "F32")
