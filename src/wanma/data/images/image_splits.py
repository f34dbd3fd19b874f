"""Files of labelled images: those of training and those of validation, by names of files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wanma.data.images.image_files import ImageFiles, UnknownImagesError, find_image_files
from wanma.data.index.records import without_descriptions
from wanma.data.stores.listing import MAX_RETRY_SECONDS, StoredFile, list_files
from wanma.job.sections.data_sources import EntriesSection

_TRAIN = ("train", "training")
_VALIDATION = ("validation", "valid", "val", "dev")
_TEST = ("test", "testing")
_SPLITS = (*_TRAIN, *_VALIDATION, *_TEST)
_SPLIT_NAME = re.compile(rf"({'|'.join(sorted(_SPLITS, key=len, reverse=True))})[-_.0-9]")
_FILES_OF_ALL_SPLITS = ("dataset_dict.json",)


@dataclass(frozen=True)
class SplitFiles:
    """Files of training or of validation."""

    files: list[StoredFile] = field(default_factory=list)
    arrays: tuple[str, ...] = ()
    """Names of the arrays of images and of labels, where they are in an .npz; else empty."""

    @property
    def size(self) -> int:
        """Size in bytes, as stored."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class ImageSplit:
    """Files of training and of validation; no files of validation: there is no split."""

    train: SplitFiles
    validation: SplitFiles


def find_image_split(
    source: EntriesSection, table: str, *, by_name: bool, retry_seconds: float = MAX_RETRY_SECONDS
) -> ImageSplit:
    """List the files of a source, divided into training and validation.

    Args:
        table: table of the job that declares it.
        by_name: recognize the files of MNIST, CIFAR-10 and .npz by their names.

    Raises:
        JobError: an entry is missing or matches nothing.
    """
    key = f"{table}.{source.entries_key}"
    if by_name and (found := find_known_images(source, table)) is not None:
        return ImageSplit(_named_files(found.train, key), _named_files(found.test, key))
    train, validation = split_files(without_descriptions(list_files(source.entries, key, retry_seconds)))
    return ImageSplit(SplitFiles(train), SplitFiles(validation))


def find_known_images(source: EntriesSection, table: str) -> ImageFiles | None:
    """Find the files of MNIST, CIFAR-10 or an .npz by their names, where a job names no fields or format.

    Returns:
        The files; None: images in any other format, or not in one local place.

    Raises:
        JobError: nothing is there, or files are missing.
    """
    columns, entries = source.columns, source.entries
    if source.format or columns.image or columns.target or len(entries) != 1:
        return None
    if "://" in entries[0] or any(character in entries[0] for character in "*?["):
        return None
    try:
        return find_image_files(entries[0], f"{table}.{source.entries_key}")
    except UnknownImagesError:
        return None


def split_files(files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[StoredFile]]:
    """Divide files whose folders or names all name a split, such as `train/` or `test-00000.parquet`.

    Files for validation come before those for a test, which are left out if both are there. If one file names
    no split, or none is for training, all are for training.
    """
    splits = files_by_split(files)
    if not splits:
        return list(files), []
    return splits["train"], splits.get("validation") or splits.get("test") or []


def files_by_split(files: Sequence[StoredFile]) -> dict[str, list[StoredFile]]:
    """Return the files of "train", "validation" and "test", as far as there are some.

    Empty if one file names no split, or none is for training.
    """
    candidates = [file for file in files if file.url.rpartition("/")[2] not in _FILES_OF_ALL_SPLITS]
    urls = [file.url.lstrip("/") for file in candidates]  # paths and URLs have a common path, if an empty one
    if len(urls) < 2:
        return {}
    depth = len([part for part in os.path.commonpath(urls).split("/") if part])
    names = [_split_name([part for part in url.split("/") if part][depth:]) for url in urls]
    if None in names or not set(names) & set(_TRAIN):
        return {}
    kinds = {"train": _TRAIN, "validation": _VALIDATION, "test": _TEST}
    splits = {
        split: [file for file, name in zip(candidates, names, strict=True) if name in kind]
        for split, kind in kinds.items()
    }
    return {split: members for split, members in splits.items() if members}


def _named_files(files: Sequence[str | Path], key: str) -> SplitFiles:
    paths = [str(file) for file in files if isinstance(file, Path)]
    arrays = tuple(file for file in files if not isinstance(file, Path))
    return SplitFiles(list_files(paths, key), arrays) if paths else SplitFiles()


def _split_name(parts: Sequence[str]) -> str | None:
    """Return the split that the first folder or the name of a file names, as it is written there."""
    first = parts[0].lower() if parts else ""
    if len(parts) > 1 and first in _SPLITS:
        return first
    match = _SPLIT_NAME.match(parts[-1].lower()) if parts else None
    return match[1] if match is not None and len(parts) == 1 else None
