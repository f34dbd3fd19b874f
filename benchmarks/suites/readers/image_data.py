"""JPEG images and their classes, and the transform that readers without one of their own share."""

from __future__ import annotations

import argparse
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from contents import LabelledImages
from made_data import made
from PIL import Image
from torch import Tensor

CLASSES = 8
SIZE = 224
_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_STD = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True)
class ImageData:
    """JPEG images in one folder for each class.

    Args:
        folder: folder of all data.
        images: number of images, a multiple of `shards`.
        shards: files in which readers of archives store them.
    """

    folder: Path
    images: int
    shards: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> ImageData:
        return cls(options.folder, 128, 4) if options.small else cls(options.folder, 2048, 16)

    @property
    def image_folder(self) -> Path:
        return made(self.folder, "images", self._write)

    def files(self) -> list[tuple[Path, int]]:
        """Return all images with their classes."""
        return [(path, int(path.parent.name)) for path in sorted(self.image_folder.glob("*/*.jpg"))]

    def content(self) -> LabelledImages:
        """Return the samples of all readers."""
        size = sum(path.stat().st_size for path, _ in self.files())
        return LabelledImages(lambda: [label for _, label in self.files()], self.images, size)

    def _write(self, folder: Path) -> None:
        """Write smooth random images with some noise, whose size in bytes is that of photographs."""
        for number in range(self.images):
            generator = np.random.default_rng(number)
            width, height = generator.integers(300, 501, 2).tolist()
            coarse = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8))
            pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
            noisy = pixels + generator.normal(0, 12, pixels.shape).astype(np.int16)
            place = folder / str(number % CLASSES)
            place.mkdir(exist_ok=True)
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place / f"{number:05}.jpg", quality=85)


def transform(content: bytes) -> Tensor:
    """Return a training image (3, `SIZE`, `SIZE`): a random region, resized, perhaps flipped, normalized.

    Region and flip are drawn as by torchvision's `RandomResizedCrop` and `RandomHorizontalFlip`.
    """
    image = Image.open(io.BytesIO(content)).convert("RGB")
    region = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=_region(*image.size))
    if random.random() < 0.5:
        region = region.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(region, np.float32) / 255
    return torch.from_numpy(((pixels - _MEAN) / _STD).transpose(2, 0, 1).copy())


def _region(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = random.randint(0, width - w), random.randint(0, height - h)
            return left, upper, left + w, upper + h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2
