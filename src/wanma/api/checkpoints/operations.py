"""Operations on checkpoints: inventory, verification, comparison, and conversion to another form."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wanma.checkpoint.format.manifest import MANIFEST
from wanma.checkpoint.inspection.integrity_scan import FolderFiles, Scan, scan
from wanma.checkpoint.inspection.inventory import Entry, at_url, in_folder
from wanma.checkpoint.load.verification import find_whole
from wanma.checkpoint.remote.remote_storage import Storage, is_url
from wanma.checkpoint.store.checkpoint_folder import committed
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from wanma.checkpoint.inspection.comparison import Comparison
    from wanma.checkpoint.load.reader import Saved

Form = Literal["checkpoint", "safetensors", "huggingface"]
PRECISIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_WEIGHTS = ("average.", "model.")
"""Prefixes of the names of weights; averaged ones are preferred, as in `wanma sample`."""
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    folder: Path
    checkpoint: Path
    tensors: int
    bytes: int


def inventory(place: str) -> list[Entry]:
    """List the checkpoints in a folder or at a URL, newest first; a checkpoint's own folder gives one entry.

    Raises:
        WanmaError: the place cannot be read.
    """
    if is_url(place):
        return at_url(Storage(place))
    folder = Path(place)
    if (folder / MANIFEST).is_file():
        return [entry for entry in in_folder(folder.parent) if entry.name == folder.name]
    return in_folder(folder)


def scans(place: str) -> Iterator[Scan]:
    """Yield a scan of each checkpoint in a folder or at a URL, newest first, or of the single one there.

    Raises:
        WanmaError: there is no checkpoint, or the place cannot be read.
    """
    count = 0
    if is_url(place):
        storage = Storage(place)
        if storage.size(MANIFEST) is not None:
            yield scan(place.rstrip("/").rpartition("/")[2], storage)
            return
        for entry in at_url(storage):
            count += 1
            yield scan(entry.name, storage.below(entry.name))
    elif _is_checkpoint(Path(place)):
        count = 1
        yield scan(Path(place).name, FolderFiles(Path(place)))
    else:
        for _, path in _committed(Path(place)):
            count += 1
            yield scan(path.name, FolderFiles(path))
    if not count:
        raise _none_in(place)


def one_checkpoint(place: str, on_message: Callable[[str], None] = warnings.warn) -> Path:
    """Return the checkpoint at a path: the checkpoint itself, or the newest complete one of a folder.

    Args:
        on_message: receives the reason if damage makes the result older than the newest checkpoint.

    Raises:
        WanmaError: there is none.
    """
    if is_url(place):
        raise WanmaError(
            f"{place} is not on this machine", "copy the checkpoint's folder here first", EXIT_USAGE
        )
    path = Path(place)
    if _is_checkpoint(path):
        return path
    if not _committed(path):
        raise _none_in(place)
    return find_whole(path, None, on_message)


def diff(a: str, b: str, on_message: Callable[[str], None] = warnings.warn) -> tuple[Path, Path, Comparison]:
    """Compare two checkpoints; of a run or folder the newest complete one is taken.

    Raises:
        WanmaError: one does not exist, or is damaged.
    """
    from wanma.checkpoint.inspection.comparison import compare

    left, right = one_checkpoint(a, on_message), one_checkpoint(b, on_message)
    return left, right, compare(left, right)


def convert(
    place: str,
    folder: Path,
    form: Form = "checkpoint",
    *,
    precision: str | None = None,
    files: int = 1,
    weights_only: bool = False,
    on_message: Callable[[str], None] = warnings.warn,
) -> Converted:
    """Write a copy of a checkpoint in another form into `folder`; the original is verified and not changed.

    Args:
        form: "checkpoint": wanma's own, in `files` data files, state included. "safetensors": the weights
            alone, by the model's own names. "huggingface": as `wanma export`, which needs the run around it.
        precision: precision of the weights; None: unchanged. Optimizer state keeps its own.
        weights_only: omit the optimizer state; the result can start a run, but not continue one.

    Raises:
        WanmaError: the checkpoint is damaged, `folder` is in use, or the form does not fit the checkpoint.
    """
    path = one_checkpoint(place, on_message)
    if form == "huggingface":
        return _published(path, folder, precision)
    from wanma.checkpoint.conversion import conversion
    from wanma.checkpoint.load.reader import Saved

    saved = Saved(path)
    kinds = {
        name: PRECISIONS[precision]
        if precision and _is_weight(name) and entry.dtype in _FLOATS
        else entry.dtype
        for name, entry in saved.tensors.items()
        if _is_weight(name) or not weights_only
    }
    if form == "checkpoint":
        manifest = conversion.convert(path, folder, kinds, files)
        return Converted(folder, path, len(manifest.tensors), manifest.bytes)
    return _plain(path, folder, saved, kinds)


def _plain(path: Path, folder: Path, saved: Saved, kinds: dict[str, str]) -> Converted:
    """Write the weights as safetensors, by the model's own names."""
    from wanma.api.checkpoints.export import FILE_BYTES
    from wanma.checkpoint.conversion.conversion import require_whole, with_dtype
    from wanma.checkpoint.conversion.huggingface_weights import write_published

    require_whole(path)
    names = {
        name.removeprefix(prefix): name
        for prefix in reversed(_WEIGHTS)
        for name in kinds
        if name.startswith(prefix)
    }
    if not names:
        raise WanmaError(f"{path} holds no weights", "only checkpoints of a training have some")
    tensors = {short: (kinds[name], saved.tensors[name].shape) for short, name in names.items()}
    write_published(
        folder,
        tensors,
        lambda short: with_dtype(short, saved.read(names[short]), kinds[names[short]]),
        {},
        FILE_BYTES,
    )
    return Converted(folder, path, len(tensors), _bytes(folder))


def _published(path: Path, folder: Path, precision: str | None) -> Converted:
    from wanma.api.checkpoints.export import export

    run = RunDirectory(path.absolute().parent.parent)
    if not run.job.is_file():
        raise WanmaError(
            f"{path} lies in no run directory, whose job.toml says what its model is",
            "give a checkpoint of a run, or take --format safetensors",
            EXIT_USAGE,
        )
    done = export(run, folder, checkpoint=path, precision=precision)  # type: ignore[arg-type]  # checked by the parser
    return Converted(folder, path, done.tensors, _bytes(folder))


def _is_weight(name: str) -> bool:
    return name.startswith(_WEIGHTS)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _is_checkpoint(path: Path) -> bool:
    """Return True for a folder that is, or should be, a checkpoint itself."""
    return (path / MANIFEST).is_file() or path.name.startswith("step-")


def _committed(folder: Path) -> list[tuple[int, Path]]:
    try:
        return committed(folder)
    except OSError as error:
        raise WanmaError(f"cannot look for checkpoints in {folder}: {error.strerror or error}") from error


def _none_in(place: str) -> WanmaError:
    return WanmaError(
        f"there is no checkpoint in {place}", "name a run, a checkpoint's folder or a URL", EXIT_USAGE
    )
