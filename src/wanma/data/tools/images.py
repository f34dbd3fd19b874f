"""Images in records, described, checked and written by Pillow, which is optional."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wanma.data.formats.byte_ranges import describe_fault
from wanma.data.formats.image_folder import image_format
from wanma.data.images.transform import image_of_array, import_pillow
from wanma.job.errors import WanmaError


def has_pillow() -> bool:
    """Return True if Pillow is installed."""
    return importlib.util.find_spec("PIL") is not None


def image_description(content: bytes) -> str:
    """Return format, size and mode of an image, such as 'JPEG, 640 x 480, RGB'; without Pillow the format."""
    name = image_format(content)
    if not has_pillow():
        return name
    try:
        with _open(content) as image:
            return f"{name}, {image.width} x {image.height}, {image.mode}"
    except Exception as error:  # Pillow's decoders raise many kinds
        return f"{name}, damaged: {_cause(error)}"


def check_image(content: bytes) -> str | None:
    """Decode all pixels; return the cause if that fails, None if it succeeds or Pillow is not installed."""
    if not has_pillow():
        return None
    try:
        with _open(content) as image:
            image.load()
    except Exception as error:  # Pillow's decoders raise many kinds
        return _cause(error)
    return None


def write_png(value: bytes | NDArray[Any], path: Path) -> None:
    """Write an image as PNG.

    Args:
        value: file of an image, or pixels as of `image_of_array`.

    Raises:
        WanmaError: Pillow is not installed, the image is damaged, or the file cannot be written.
    """
    import_pillow("writing images as PNG")
    try:
        with _open(value) if isinstance(value, bytes) else image_of_array(value) as image:
            has_mode = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
            path.parent.mkdir(parents=True, exist_ok=True)
            (image if has_mode else image.convert("RGB")).save(path, "PNG")
    except Exception as error:  # Pillow's coders raise many kinds
        raise WanmaError(f"cannot write {path}: {_cause(error)}") from error


def is_picture(value: Any) -> bool:
    """Return True for an array that has the shape and type of an image's pixels."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or min(value.shape, default=0) == 0:
        return False
    is_gray = value.ndim == 2 and min(value.shape) > 1
    return is_gray or (value.ndim == 3 and (value.shape[0] in (1, 3) or value.shape[2] in (1, 3, 4)))


def _open(content: bytes) -> Any:
    return import_pillow("reading images").open(io.BytesIO(content))


def _cause(error: Exception) -> str:
    if type(error).__name__ == "UnidentifiedImageError":  # its text has the address of an object
        return "Pillow does not know its format, or its header is damaged"
    return describe_fault(error)
