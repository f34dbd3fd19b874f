"""Data set of labelled images: kept as they are stored, normalized when a batch is made."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset, InputKind, make_batch
from wanma.data.images.image_files import LabelledImages
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError

_BLOCK = 4096
"""Images processed at a time, which bounds the memory of statistics and hashes."""


class ImageDataset(BatchedDataset):
    """Data set of images: inputs (rows, channels, height, width) float32, targets (rows,) int64."""

    input_kind: ClassVar[InputKind] = "images"
    targets_per_sample = 1

    def __init__(
        self,
        train: LabelledImages,
        test: LabelledImages | None,
        *,
        validation_fraction: float,
        shuffle: Shuffle,
        seed: int,
        total_samples: int,
    ) -> None:
        digests = _hash_images(train)
        if test is None:
            train, test = _split_by_content(train, digests, validation_fraction)
        self._train = train
        self._test = test
        self._total = total_samples
        self._mean, self._deviation = _channel_statistics(train.images)
        self.seed = seed
        self.train_samples = len(train.labels)
        self.validation_samples = len(test.labels)
        self.order: SampleOrder = SampleOrder.of_source(self.train_samples, shuffle, seed)
        channels, height, width = train.images.shape[1:]
        self.image_shape = (channels, height, width)
        self.classes = int(max(train.labels.max(), test.labels.max() if len(test.labels) else 0)) + 1
        content = digests.tobytes() + train.labels.tobytes() + test.labels.tobytes()
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.input_kind,
            "fingerprint": self.fingerprint,
            "image_shape": self.image_shape,
            "classes": self.classes,
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "epochs": self._total / self.train_samples,
            "mean": self._mean.ravel().tolist(),
            "standard_deviation": self._deviation.ravel().tolist(),
        }

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        return self._read(self._train, self.order.rows(sample_indices), sample_indices)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        return self._read(self._test, rows, sample_indices)

    def _read(self, split: LabelledImages, rows: IndexArray, sample_indices: IndexArray) -> Batch:
        pixels = split.images[rows].astype(np.float32)
        pixels -= self._mean
        pixels /= self._deviation
        return make_batch((torch.from_numpy(pixels),), torch.from_numpy(split.labels[rows]), sample_indices)


def _split_by_content(
    images: LabelledImages, digests: NDArray[np.uint64], fraction: float
) -> tuple[LabelledImages, LabelledImages]:
    """Split images by content, so that equal ones are on the same side; at least one image on each."""
    is_test = digests < np.uint64(int(fraction * 2.0**64))
    if fraction and not is_test.any():
        is_test = digests == digests.min()
    if is_test.all():
        raise JobError(
            f"data.images: {len(digests)} images are too few for a validation split",
            "add images, or set data.validation_fraction=0",
        )
    return (
        LabelledImages(images.images[~is_test], images.labels[~is_test]),
        LabelledImages(images.images[is_test], images.labels[is_test]),
    )


def _hash_images(images: LabelledImages) -> NDArray[np.uint64]:
    """Return a hash of each image, (images,)."""
    digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images.images]
    return np.frombuffer(b"".join(digests), dtype="<u8")


def _channel_statistics(images: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and standard deviation by channel, (1, channels, 1, 1); constant channels divide by 1."""
    total = np.zeros(images.shape[1])
    square = np.zeros(images.shape[1])
    for start in range(0, len(images), _BLOCK):
        block = images[start : start + _BLOCK].astype(np.float64)
        total += block.sum(axis=(0, 2, 3))
        square += np.einsum("nchw,nchw->c", block, block)
    count = images.size / images.shape[1]
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean**2, 0))
    deviation[deviation < 1e-6 * np.maximum(np.abs(mean), 1e-6)] = 1
    shape = (1, -1, 1, 1)
    return mean.reshape(shape).astype(np.float32), deviation.reshape(shape).astype(np.float32)
