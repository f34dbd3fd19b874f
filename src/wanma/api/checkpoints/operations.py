"""Operations on checkpoints: inventory, verification, comparison, and conversion to another form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wanma.checkpoint.format.manifest import MANIFEST_FILE
from wanma.checkpoint.inspection.integrity_scan import LocalFiles, ScanResult, scan_checkpoint
from wanma.checkpoint.inspection.inventory import CheckpointEntry, list_at_url, list_in_folder
from wanma.checkpoint.load.verification import find_valid
from wanma.checkpoint.remote.remote_storage import RemoteStorage, is_url
from wanma.checkpoint.store.checkpoint_folder import list_committed
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from wanma.checkpoint.inspection.comparison import CheckpointDifference
    from wanma.checkpoint.load.reader import CheckpointReader

CheckpointFormat = Literal["checkpoint", "safetensors", "huggingface"]
PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WEIGHT_PREFIXES = ("average.", "model.")
"""Prefixes of the names of weights; averaged ones are preferred, as in `wanma sample`."""
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion."""

    folder: Path
    checkpoint: Path
    tensors: int
    bytes: int


def inventory(location: str) -> list[CheckpointEntry]:
    """List the checkpoints in a folder or at a URL, newest first; a checkpoint's own folder gives one entry.

    Raises:
        WanmaError: the place cannot be read.
    """
    if is_url(location):
        return list_at_url(RemoteStorage(location))
    folder = Path(location)
    if (folder / MANIFEST_FILE).is_file():
        return [entry for entry in list_in_folder(folder.parent) if entry.name == folder.name]
    return list_in_folder(folder)


def scan_checkpoints(location: str) -> Iterator[ScanResult]:
    """Yield a scan of each checkpoint in a folder or at a URL, newest first, or of the single one there.

    Raises:
        WanmaError: there is no checkpoint, or the place cannot be read.
    """
    count = 0
    if is_url(location):
        storage = RemoteStorage(location)
        if storage.size(MANIFEST_FILE) is not None:
            yield scan_checkpoint(location.rstrip("/").rpartition("/")[2], storage)
            return
        for entry in list_at_url(storage):
            count += 1
            yield scan_checkpoint(entry.name, storage.subfolder(entry.name))
    elif _is_checkpoint(Path(location)):
        count = 1
        yield scan_checkpoint(Path(location).name, LocalFiles(Path(location)))
    else:
        for _, path in _committed(Path(location)):
            count += 1
            yield scan_checkpoint(path.name, LocalFiles(path))
    if not count:
        raise _no_checkpoint_error(location)


def resolve_checkpoint(location: str, on_message: Callable[[str], None] = warnings.warn) -> Path:
    """Return the checkpoint at a path: the checkpoint itself, or the newest complete one of a folder.

    Args:
        on_message: receives the reason if damage makes the result older than the newest checkpoint.

    Raises:
        WanmaError: there is none.
    """
    if is_url(location):
        raise WanmaError(
            f"{location} is not on this node", "copy the checkpoint folder to this node first", EXIT_USAGE
        )
    path = Path(location)
    if _is_checkpoint(path):
        return path
    if not _committed(path):
        raise _no_checkpoint_error(location)
    return find_valid(path, None, on_message)


def compare_newest(
    a: str, b: str, on_message: Callable[[str], None] = warnings.warn
) -> tuple[Path, Path, CheckpointDifference]:
    """Compare two checkpoints; of a run or folder the newest complete one is taken.

    Raises:
        WanmaError: one does not exist, or is damaged.
    """
    from wanma.checkpoint.inspection.comparison import compare_checkpoints

    left, right = resolve_checkpoint(a, on_message), resolve_checkpoint(b, on_message)
    return left, right, compare_checkpoints(left, right)


def convert(
    location: str,
    folder: Path,
    checkpoint_format: CheckpointFormat = "checkpoint",
    *,
    precision: str | None = None,
    files: int = 1,
    weights_only: bool = False,
    on_message: Callable[[str], None] = warnings.warn,
) -> ConversionResult:
    """Write a copy of a checkpoint in another form into `folder`; the original is verified and not changed.

    Args:
        checkpoint_format: "checkpoint": wanma's own, in `files` data files, state included. "safetensors":
            the weights alone, by the model's own names. "huggingface": as `wanma export`, which needs the
            run around it.
        precision: precision of the weights; None: unchanged. Optimizer state keeps its own.
        weights_only: omit the optimizer state; the result can start a run, but not continue one.

    Raises:
        WanmaError: the checkpoint is damaged, `folder` is in use, or the form does not fit the checkpoint.
    """
    path = resolve_checkpoint(location, on_message)
    if checkpoint_format == "huggingface":
        return _convert_to_huggingface(path, folder, precision)
    from wanma.checkpoint.conversion import conversion
    from wanma.checkpoint.load.reader import CheckpointReader

    saved = CheckpointReader(path)
    kinds = {
        name: PRECISIONS[precision]
        if precision and _is_weight(name) and entry.dtype in _FLOAT_DTYPES
        else entry.dtype
        for name, entry in saved.tensors.items()
        if _is_weight(name) or not weights_only
    }
    if checkpoint_format == "checkpoint":
        manifest = conversion.convert_checkpoint(path, folder, kinds, files)
        return ConversionResult(folder, path, len(manifest.tensors), manifest.bytes)
    return _convert_to_safetensors(path, folder, saved, kinds)


def _convert_to_safetensors(
    path: Path, folder: Path, reader: CheckpointReader, dtypes: dict[str, str]
) -> ConversionResult:
    """Write the weights as safetensors, by the model's own names."""
    from wanma.api.checkpoints.export import FILE_BYTES
    from wanma.checkpoint.conversion.conversion import cast_tensor, require_valid
    from wanma.checkpoint.conversion.huggingface_weights import write_huggingface_weights

    require_valid(path)
    saved_names = {
        name.removeprefix(prefix): name
        for prefix in reversed(_WEIGHT_PREFIXES)
        for name in dtypes
        if name.startswith(prefix)
    }
    if not saved_names:
        raise WanmaError(f"{path} contains no weights", "give a checkpoint of a training run")
    tensors = {
        parameter: (dtypes[name], reader.tensors[name].shape) for parameter, name in saved_names.items()
    }
    write_huggingface_weights(
        folder,
        tensors,
        lambda parameter: cast_tensor(
            parameter, reader.read(saved_names[parameter]), dtypes[saved_names[parameter]]
        ),
        {},
        FILE_BYTES,
    )
    return ConversionResult(folder, path, len(tensors), _weight_bytes(folder))


def _convert_to_huggingface(path: Path, folder: Path, precision: str | None) -> ConversionResult:
    from wanma.api.checkpoints.export import export

    run = RunDirectory(path.absolute().parent.parent)
    if not run.job.is_file():
        raise WanmaError(
            f"{path} is not in a run directory, and its model is unknown without job.toml",
            "give a checkpoint in a run directory, or --format safetensors",
            EXIT_USAGE,
        )
    done = export(run, folder, checkpoint=path, precision=precision)  # type: ignore[arg-type]  # checked by the parser
    return ConversionResult(folder, path, done.tensors, _weight_bytes(folder))


def _is_weight(name: str) -> bool:
    return name.startswith(_WEIGHT_PREFIXES)


def _weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _is_checkpoint(path: Path) -> bool:
    """Return True for a folder that is, or should be, a checkpoint itself."""
    return (path / MANIFEST_FILE).is_file() or path.name.startswith("step-")


def _committed(folder: Path) -> list[tuple[int, Path]]:
    try:
        return list_committed(folder)
    except OSError as error:
        raise WanmaError(f"cannot list the checkpoints in {folder}: {error.strerror or error}") from error


def _no_checkpoint_error(location: str) -> WanmaError:
    return WanmaError(
        f"there is no checkpoint in {location}", "give a run, a checkpoint folder or a URL", EXIT_USAGE
    )
