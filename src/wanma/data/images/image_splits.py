"""Files of labelled images: those of training and those of validation, by names of files and folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wanma.data.images.image_files import UnknownImagesError, find_image_files
from wanma.data.index.records import is_description
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
    entries: Sequence[str], key: str, *, by_name: bool = True, retry_seconds: float = MAX_RETRY_SECONDS
) -> ImageSplit:
    """List the files of entries, divided into training and validation.

    Args:
        by_name: recognize the files of MNIST, CIFAR-10 and .npz by their names.

    Raises:
        JobError: an entry is missing or matches nothing.
    """
    path = only_entry(entries) if by_name else None
    try:
        found = None if path is None else find_image_files(path, key)
    except UnknownImagesError:  # images of any other format
        found = None
    if found is not None:
        return ImageSplit(_named_files(found.train, key), _named_files(found.test, key))
    listed = list_files(entries, key, retry_seconds)
    train, validation = split_files(
        [file for file in listed if file.is_named or not is_description(file.url)]
    )
    return ImageSplit(SplitFiles(train), SplitFiles(validation))


def may_be_known_by_name(source: EntriesSection) -> bool:
    """Return True if files of MNIST, CIFAR-10, .npz may be known by their names: the job names no fields."""
    return not (source.format or source.columns.image or source.columns.target)


def only_entry(entries: Sequence[str]) -> str | None:
    """Return the only entry if it is a local path without a pattern; else None."""
    if len(entries) != 1 or "://" in entries[0] or any(character in entries[0] for character in "*?["):
        return None
    return entries[0]


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
