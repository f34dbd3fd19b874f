"""Reader of labelled images: MNIST's IDX, CIFAR-10's binary format (plain or gzip), or an .npz.

Everything is read as it is stored, uint8 where it is uint8, as (images, channels, height, width). No torch
here.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.job.errors import JobError, WanmaError

_CIFAR_FOLDER = "cifar-10-batches-bin"
_CIFAR_RECORD = 1 + 3 * 32 * 32
_TRAIN_ARRAY_NAMES = (("x_train", "y_train"), ("images", "labels"))
_TEST_ARRAY_NAMES = (("x_test", "y_test"), ("test_images", "test_labels"))


class UnknownImagesError(JobError):
    """Error: files that are in no format of this reader."""


@dataclass(frozen=True)
class LabelledImages:
    """Set of labelled images: images (count, channels, height, width), labels (count,) int64."""

    images: NDArray[Any]
    labels: NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.ndim != 1 or len(self.images) != len(self.labels):
            raise ValueError(f"images of shape {self.images.shape} with labels of shape {self.labels.shape}")
        if len(self.labels) and self.labels.min() < 0:
            raise ValueError(f"a label is {self.labels.min()}; classes count from 0")


def read_image_files(path: str, key: str = "data.images") -> tuple[LabelledImages, LabelledImages | None]:
    """Read the training set, and the test set if there is one.

    Raises:
        JobError: nothing is there, or the format is unknown.
        WanmaError: a file cannot be read or is damaged; names `key` and the file.
    """
    files = find_image_files(path, key)
    train = _read(files.train, key)
    test = _read(files.test, key) if files.test else None
    if test is not None and test.images.shape[1:] != train.images.shape[1:]:
        shapes = f"{train.images.shape[1:]} for training but {test.images.shape[1:]} for testing"
        raise WanmaError(f"{key}: the images in '{path}' have different shapes: {shapes}")
    return train, test


@dataclass(frozen=True)
class ImageFiles:
    """Files of the training set and of the test set.

    IDX: the files of images and of labels; CIFAR-10: its batches; .npz: the file and the names of two arrays.
    """

    train: tuple[str | Path, ...]
    test: tuple[str | Path, ...]


def find_image_files(path: str, key: str = "data.images") -> ImageFiles:
    """Find the files of both sets by their names, without reading them.

    A single set in a folder, even one named as a test set, is taken for training.

    Raises:
        JobError: nothing is there, or the format is unknown.
    """
    location = Path(path).expanduser()
    if not location.exists():
        raise JobError(f"{key}: '{path}' does not exist", "paths are relative to where wanma is started")
    if location.suffix == ".npz":
        return _find_npz(location, key)
    names = [location] if location.is_file() else _list_files(location, key)
    files = (
        _find_cifar(names) or _find_cifar(_list_files(location / _CIFAR_FOLDER, key)) or _find_idx(names, key)
    )
    if files:
        train, test = files
        return ImageFiles(train or test, test if train else ())
    archives = [name for name in names if name.suffix == ".npz"]
    if len(archives) == 1:
        return _find_npz(archives[0], key)
    raise UnknownImagesError(
        f"{key}: '{path}' contains no images in a supported format",
        "use MNIST files (*train*images*idx3*), CIFAR-10 binary files (data_batch_1.bin ...), or an .npz "
        "file",
    )


def _list_files(folder: Path, key: str) -> list[Path]:
    """List the files in `folder`, sorted; a compressed copy of a listed file is left out."""
    try:
        names = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise _unreadable_file(folder, key, error) from error
    return [name for name in names if name.suffix != ".gz" or name.with_suffix("") not in names]


def _find_cifar(names: Sequence[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]] | None:
    def named(start: str) -> tuple[Path, ...]:
        return tuple(name for name in names if name.name.startswith(start) and ".bin" in name.suffixes)

    train, test = named("data_batch_"), named("test_batch")
    return (train, test) if train or test else None


def _find_idx(names: Sequence[Path], key: str) -> tuple[tuple[Path, ...], tuple[Path, ...]] | None:
    images = [name for name in names if "images" in name.name and "idx3" in name.name]
    test = [name for name in images if "t10k" in name.name or "test" in name.name]
    train = [name for name in images if name not in test]
    for image_files in (train, test):
        if len(image_files) > 1:
            raise JobError(
                f"{key}: the folder contains more than one data set: "
                f"{', '.join(name.name for name in image_files)}",
                "keep one data set per folder, or give the path of the image file",
            )
    if not images:
        return None
    return (_idx_pair(train[0], key) if train else ()), (_idx_pair(test[0], key) if test else ())


def _idx_pair(images: Path, key: str) -> tuple[Path, ...]:
    stem = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for candidate in (images.with_name(stem), images.with_name(f"{stem}.gz")):
        if candidate != images and candidate.exists():
            return images, candidate
    raise JobError(
        f"{key}: the label file of '{images}' is missing", f"add {stem} or {stem}.gz to the folder"
    )


def _find_npz(path: Path, key: str) -> ImageFiles:
    try:
        if not zipfile.is_zipfile(path):  # numpy would take it for another of its formats
            raise ValueError("it is not an .npz archive, or is truncated")
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _unreadable_file(path, key, error) from error
    train = next((pair for pair in _TRAIN_ARRAY_NAMES if names.issuperset(pair)), None)
    test = next((pair for pair in _TEST_ARRAY_NAMES if names.issuperset(pair)), None)
    if train is None:
        raise JobError(
            f"{key}: the arrays {', '.join(sorted(names))} of '{path}' are not recognized",
            "name them images and labels, or x_train, y_train, x_test and y_test",
        )
    return ImageFiles((path, *train), (path, *test) if test else ())


def _read(files: tuple[str | Path, ...], key: str) -> LabelledImages:
    first = Path(files[0])
    try:
        if isinstance(files[-1], str):
            labelled_images = _read_npz(first, str(files[1]), files[-1])
        elif "idx" in first.name:
            labelled_images = _read_idx(first, Path(files[1]))
        else:
            labelled_images = _read_cifar([Path(name) for name in files])
        if not len(labelled_images.labels):
            raise ValueError("it contains no image")
    except (OSError, ValueError, EOFError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise _unreadable_file(first, key, error) from error
    return labelled_images


def _read_idx(images: Path, labels: Path) -> LabelledImages:
    pixels = _idx_array(images, 3)
    return LabelledImages(pixels[:, None], _idx_array(labels, 1).astype(np.int64))


def _idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Parse IDX (LeCun's MNIST page): 0, 0, type 8 (uint8), dimensions, big-endian sizes, then the values."""
    content = _read_bytes(path)
    header = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]):
        raise ValueError(
            f"{path.name} does not have the header of an IDX file of bytes with {dimensions} dimensions"
        )
    shape = tuple(int(size) for size in np.frombuffer(content[:header], dtype=">u4", offset=4))
    if len(content) - header != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path.name} has {len(content) - header} bytes of values for the shape {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _read_cifar(paths: Sequence[Path]) -> LabelledImages:
    """Read CIFAR-10 binary (Krizhevsky's page): records of 1 label and 3 × 32 × 32 values, channels first."""
    batches = []
    for path in paths:
        content = _read_bytes(path)
        if not content or len(content) % _CIFAR_RECORD:
            raise ValueError(
                f"{path.name} has {len(content)} bytes, which is not a multiple of {_CIFAR_RECORD}"
            )
        batches.append(np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR_RECORD))
    records = np.concatenate(batches)
    labels = records[:, 0].astype(np.int64)
    if labels.max() > 9:
        raise ValueError(f"a label is {labels.max()}; CIFAR-10 has 0 to 9")
    return LabelledImages(np.ascontiguousarray(records[:, 1:]).reshape(-1, 3, 32, 32), labels)


def _read_npz(path: Path, images: str, labels: str) -> LabelledImages:
    with np.load(path, allow_pickle=False) as archive:
        pixels, classes = archive[images], archive[labels]
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    elif pixels.ndim == 4 and pixels.shape[3] in (1, 3, 4):  # channels last, as Keras and most files have it
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    if pixels.dtype != np.uint8 and not np.issubdtype(pixels.dtype, np.floating):
        raise ValueError(
            f"the array {images} has dtype {pixels.dtype}; uint8 and floating point are supported"
        )
    if classes.ndim == 2 and classes.shape[1] == 1:
        classes = classes[:, 0]
    if not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"the array {labels} has dtype {classes.dtype}, but labels must be integers")
    return LabelledImages(pixels, classes.astype(np.int64))


def _read_bytes(path: Path) -> bytes:
    if path.suffix == ".gz":
        with gzip.open(path) as stream:
            return stream.read()
    return path.read_bytes()


def _unreadable_file(path: Path, key: str, error: Exception) -> WanmaError:
    if isinstance(error, PermissionError):
        return WanmaError(f"{key}: no permission to read '{error.filename or path}'")
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return WanmaError(f"{key}: '{path}' cannot be read: {cause}", "download the file again if it is damaged")
