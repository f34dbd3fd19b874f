"""Transform of a stored image to an array of one shape: decode, crop, resize, flip, normalize. No torch here.

Random changes are functions of the numbers that a caller draws, so that a sample looks the same on any rank.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import describe_fault
from wanma.data.images.own_transforms import OwnTransform, draw_generator, find_transforms
from wanma.job.errors import JobError, missing_extra_error
from wanma.job.sections.images import BUILT_IN_CHANGES, ImageTransformSection

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_GRAY_MODES = ("1", "L", "LA", "La")
_DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_CROP_AREA, _CROP_RATIO, _CROP_ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Defaults of torchvision's `RandomResizedCrop` (Szegedy et al. 2015)."""
_DRAFT_GAP, _REDUCING_GAP = 2.0, 3.0
"""Factors by which Pillow's fast reductions stay above the final size, see `Image.thumbnail` and `resize`."""
_MIN_SIDE = 2

Box = tuple[float, float, float, float]
"""Region of an image in pixels: left, upper, right, lower."""


def import_pillow(purpose: str = "data.images") -> Any:
    """Import Pillow's module `Image`.

    Args:
        purpose: key or work that needs it, for the message.

    Raises:
        WanmaError: Pillow is not installed; names its extra.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra_error("pillow", "images", purpose) from error
    return Image


def uniform_draws(*key: int | str) -> Iterator[float]:
    """Yield numbers in [0, 1) that depend on `key` alone, on any machine and with any version of numpy."""
    block = 0
    while True:
        digest = hashlib.blake2b(json.dumps([*key, block]).encode()).digest()
        for word in np.frombuffer(digest, "<u8").tolist():
            yield (word >> 11) * 2.0**-53
        block += 1


@dataclass(frozen=True)
class ImageTransform:
    """Transform of images to arrays (channels, height, width) of float32.

    Args:
        channels: 1 or 3.
        mean, std: statistics by channel, of pixels in [0, 1].
        resizes: crop and resize images of other sizes; False: refuse them.
        converts_colors: let images with colors become gray; False: refuse them where `channels` is 1.
        augment: names of built-in random changes.
        own: transforms of other packages, called in this order after the built-in changes.
    """

    height: int
    width: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resizes: bool
    converts_colors: bool
    augment: tuple[str, ...] = ()
    own: tuple[OwnTransform, ...] = ()
    key: str = "data.images"

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width

    def write(self, value: Any, out: NDArray[np.float32], draws: Iterator[float] | None = None) -> None:
        """Decode `value`, change it, and write its pixels to `out`; errors as of the three steps."""
        self.normalize(self.change(self.decode(value, draws), draws), out)

    def decode(self, value: Any, draws: Iterator[float] | None = None) -> NDArray[np.uint8]:
        """Decode an image, with the built-in changes; (height, width, channels).

        Args:
            value: encoded image, array of pixels, or a mapping with `bytes`.
            draws: numbers in [0, 1) for random changes; None: none is made.

        Raises:
            ValueError: the image is damaged; the message is the cause.
            JobError: the job's transform does not fit it.
        """
        image = open_image(value)
        box = None
        augment = self.augment if draws is not None else ()
        if draws is not None and "random_resized_crop" in augment:
            box = _random_box(image.size, draws)
        elif self.resizes:
            box = _center_box(image.size, self.width / self.height)
        elif image.size != (self.width, self.height):
            raise JobError(
                f"{self.key}: an image has {image.size[0]} x {image.size[1]} pixels, the first one that was "
                f"sampled {self.width} x {self.height}",
                "set data.image_transform.size, to which all are resized",
            )
        pixels = _decode(image, box, (self.width, self.height))
        pixels = self._convert(pixels)
        values = np.asarray(pixels).reshape(self.height, self.width, self.channels)
        is_flipped = draws is not None and "horizontal_flip" in augment and next(draws) < 0.5
        return values[:, ::-1] if is_flipped else values

    def change(self, values: NDArray[np.uint8], draws: Iterator[float] | None = None) -> NDArray[np.uint8]:
        """Return pixels after the transforms of other packages; `draws` are those that decoding has left.

        Raises:
            TransformError: one of them fails.
        """
        for transform in self.own:
            values = transform(values, draw_generator(draws))
        return values

    def normalize(self, values: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Write pixels (height, width, channels), normalized, to `out` (channels, height, width)."""
        planes = values.transpose(2, 0, 1)
        std = np.array(self.std, np.float32).reshape(-1, 1, 1)
        np.multiply(planes, 1 / (255 * std), out=out)
        out -= np.array(self.mean, np.float32).reshape(-1, 1, 1) / std

    def _convert(self, image: Image) -> Image:
        mode = "L" if self.channels == 1 else "RGB"
        if mode == "L" and image.mode != "L" and not self.converts_colors:
            raise JobError(
                f"{self.key}: an image has colors, but those that were sampled at the start have none",
                "set data.image_transform.channels = 3, or 1 to convert all to gray",
            )
        return image if image.mode == mode else image.convert(mode)


def fit_transform(section: ImageTransformSection, images: list[Image]) -> ImageTransform:
    """Return the transform of a job; what it leaves open follows from sampled images, at least one.

    Raises:
        JobError: mean or std has values for another number of channels, or a transform of another package
            cannot be loaded.
    """
    has_colors = any(image.mode not in _GRAY_MODES for image in images)
    channels = section.channels or (3 if has_colors else 1)
    width, height = (section.size, section.size) if section.size else images[0].size
    usual = {3: (_IMAGENET_MEAN, _IMAGENET_STD), 1: ((0.5,), (0.5,))}[channels]
    statistics = []
    for name, given, default in (("mean", section.mean, usual[0]), ("std", section.std, usual[1])):
        values = tuple(given) or default
        if len(values) not in (1, channels):
            raise JobError(
                f"data.image_transform.{name} has {len(values)} values for images of {channels} channel(s)",
                f"give {channels}, or set data.image_transform.channels",
            )
        statistics.append(values * channels if len(values) < channels else values)
    return ImageTransform(
        height,
        width,
        channels,
        mean=statistics[0],
        std=statistics[1],
        resizes=section.size is not None,
        converts_colors=section.channels is not None,
        augment=tuple(name for name in section.augment if name in BUILT_IN_CHANGES),
        own=find_transforms(section.augment),
    )


def open_image(value: Any) -> Image:
    """Open an image without decoding its pixels.

    Raises:
        ValueError: it is no image, or one that cannot be decoded.
    """
    module = import_pillow()
    value = unwrap(value)
    if isinstance(value, np.ndarray):
        return image_of_array(value)
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ValueError(f"{type(value).__name__} is no image")
    if not len(value):
        raise ValueError("the image is empty")
    try:
        image: Image = module.open(io.BytesIO(value))
    except MemoryError:
        raise
    except module.UnidentifiedImageError as error:  # its text has an address in memory
        raise ValueError("the content is no image that Pillow knows") from error
    except Exception as error:  # Pillow's parsers raise many kinds
        raise ValueError(f"the image cannot be decoded: {describe_fault(error)}") from error
    if image.mode in _DEEP_MODES:
        raise ValueError(f"pixels of more than 8 bits (mode {image.mode}) are not supported")
    if min(image.size) < 1:
        raise ValueError("the image has no pixels")
    return image


def unwrap(value: Any) -> Any:
    """Return the value inside a list of one, or the bytes of an image feature of Hugging Face."""
    if isinstance(value, Mapping) and "bytes" in value:
        if value["bytes"] is None:
            raise ValueError(f"it names the image {value.get('path')!r} and does not hold it")
        return value["bytes"]
    if isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def image_of_array(values: NDArray[Any]) -> Image:
    """Return an array (height, width), (height, width, channels) or (channels, height, width) as an image."""
    if values.dtype != np.uint8:
        raise ValueError(f"an array of {values.dtype} is no image; uint8 is")
    if values.ndim == 3 and values.shape[2] not in (1, 3, 4) and values.shape[0] in (1, 3, 4):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    is_image = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if not is_image or not values.size:
        raise ValueError(f"an array of shape {values.shape} is no image")
    image: Image = import_pillow().fromarray(np.ascontiguousarray(values))
    return image


def _decode(image: Image, box: Box | None, size: tuple[int, int]) -> Image:
    """Decode the pixels of a region at `size` (width, height); JPEG is decoded at a fraction of its size."""
    module = import_pillow()
    width, height = image.size
    try:
        if box is not None and image.format == "JPEG":
            wanted = (
                math.ceil(_DRAFT_GAP * size[0] * width / (box[2] - box[0])),
                math.ceil(_DRAFT_GAP * size[1] * height / (box[3] - box[1])),
            )
            image.draft(None, wanted)
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds
        raise ValueError(f"the image cannot be decoded: {describe_fault(error)}") from error
    if image.mode not in ("L", "RGB"):
        image = image.convert("L" if image.mode in _GRAY_MODES else "RGB")
    if box is None:
        return image
    scale_x, scale_y = image.size[0] / width, image.size[1] / height
    region = box[0] * scale_x, box[1] * scale_y, box[2] * scale_x, box[3] * scale_y
    limited = (*region[:2], min(region[2], image.size[0]), min(region[3], image.size[1]))
    return image.resize(size, module.Resampling.BILINEAR, box=limited, reducing_gap=_REDUCING_GAP)


def _center_box(size: tuple[int, int], ratio: float) -> Box:
    """Return the largest region of the ratio width / height, in the middle."""
    width, height = size
    box_width, box_height = min(width, height * ratio), min(height, width / ratio)
    left, upper = (width - box_width) / 2, (height - box_height) / 2
    return left, upper, left + box_width, upper + box_height


def _random_box(size: tuple[int, int], draws: Iterator[float]) -> Box:
    """Return a region of random area and ratio, as torchvision's `RandomResizedCrop` draws it."""
    width, height = size
    for _ in range(_CROP_ATTEMPTS):
        area = width * height * _between(*_CROP_AREA, next(draws))
        ratio = math.exp(_between(math.log(_CROP_RATIO[0]), math.log(_CROP_RATIO[1]), next(draws)))
        box_width, box_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if _MIN_SIDE <= box_width <= width and _MIN_SIDE <= box_height <= height:
            left = int(next(draws) * (width - box_width + 1))
            upper = int(next(draws) * (height - box_height + 1))
            return left, upper, left + box_width, upper + box_height
    return _center_box(size, min(max(width / height, _CROP_RATIO[0]), _CROP_RATIO[1]))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
