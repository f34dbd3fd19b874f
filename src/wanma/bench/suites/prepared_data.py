"""Data that a suite needs and nobody may have: images in the format and the numbers of CIFAR-10."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

TRAINING_FILES, TEST_FILES = [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]
IMAGES_PER_FILE = 10_000
CLASSES, SHAPE = 10, (3, 32, 32)


def prepare_cifar10(root: Path) -> Path:
    """Return a folder with files as those of "CIFAR-10 binary version", made at the first call.

    60,000 images of 3 × 32 × 32 in ten classes. An image is the pattern of its class, shifted, below noise:
    it can be learned, but no accuracy on it says anything about real images.
    """
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(10)
    coarse = 32 * generator.normal(size=(CLASSES, SHAPE[0], 8, 8))
    patterns = coarse.astype(np.int16).repeat(4, axis=2).repeat(4, axis=3)
    for number, name in enumerate([*TRAINING_FILES, *TEST_FILES]):
        path = folder / name
        if path.exists():
            continue
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(_records(patterns, np.random.default_rng([10, number])))
        partial.replace(path)
    return folder


def _records(patterns: np.ndarray, generator: np.random.Generator) -> bytes:
    """Return records of 1 label and 3 × 32 × 32 values, channels first (Krizhevsky 2009)."""
    labels = generator.integers(CLASSES, size=IMAGES_PER_FILE)
    shifts = generator.integers(8, size=IMAGES_PER_FILE)
    records = np.empty((IMAGES_PER_FILE, 1 + int(np.prod(SHAPE))), dtype=np.uint8)
    records[:, 0] = labels
    for shift in range(8):
        rows = np.flatnonzero(shifts == shift)
        images = np.roll(patterns, shift, axis=3)[labels[rows]]
        noise = generator.integers(-64, 64, size=images.shape, dtype=np.int8)
        records[rows, 1:] = np.clip(128 + images + noise, 0, 255).reshape(len(rows), -1)
    return records.tobytes()
