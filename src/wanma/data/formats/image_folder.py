"""Folders of images, one folder a class, as torchvision's ImageFolder has them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wanma.data.formats.format import (
    BadDataError,
    Certainty,
    DataFile,
    FileGroup,
    Format,
    Layout,
    Probe,
    Record,
    RowReader,
    Rows,
)

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
)
"""First bytes of formats; those of BMP and WebP have a part that differs."""


def image_format(head: bytes) -> str:
    """Return the name of an image's format by its first bytes; empty: they are those of no image."""
    if head.startswith(b"BM") and head[6:10] == bytes(4):
        return "BMP"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WebP"
    return next((name for start, name in _SIGNATURES if head.startswith(start)), "")


def is_image(head: bytes) -> bool:
    """Return True if a file begins as an image does."""
    return bool(image_format(head))


@dataclass(frozen=True)
class ImageFolder(Format):
    """Images as files: samples `{"image": bytes, "path": ...}`, in folders with `class` and `label`.

    The class is the first folder below the one that holds all; labels number the classes in alphabetical
    order. Building an index reads no image.
    """

    name: ClassVar[str] = "images"
    suffixes: ClassVar[tuple[str, ...]] = tuple(f".{suffix}" for suffix in IMAGE_SUFFIXES)

    def detect(self, probe: Probe) -> Certainty:
        return Certainty.SURE if is_image(probe.head) else Certainty.NO

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        if not files:
            return []
        urls = [file.url.lstrip("/") for file in files]  # paths and URLs have a common path, if an empty one
        root = os.path.commonpath(urls) if len(urls) > 1 else urls[0].rpartition("/")[0]
        # `commonpath` joins the slashes of `s3://`.
        depth = len([part for part in root.split("/") if part])
        paths = ["/".join([part for part in url.split("/") if part][depth:]) for url in urls]
        order = sorted(range(len(paths)), key=paths.__getitem__)
        return [
            FileGroup(
                tuple(files[number] for number in order), {"paths": [paths[number] for number in order]}
            )
        ]

    def scan(self, group: FileGroup) -> Layout:
        paths = group.facts["paths"]
        classes = sorted({path.partition("/")[0] for path in paths if "/" in path})
        if classes and not all("/" in path for path in paths):
            outside = next(path for path in paths if "/" not in path)
            raise BadDataError(
                group.url, f"{outside} lies beside the folders of the classes, in none of them"
            )
        content = "\0".join(f"{path}\0{file.size}" for path, file in zip(paths, group.files, strict=True))
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
        return Layout(len(paths), {}, {"classes": classes}, digest)

    def open(self, group: FileGroup, layout: Layout) -> RowReader:
        return _ImageReader(group, layout)


class _ImageReader(RowReader):
    def __init__(self, group: FileGroup, layout: Layout) -> None:
        self.rows = layout.rows
        self._group = group
        self._labels = {name: number for number, name in enumerate(layout.facts["classes"])}

    def read(self, rows: Rows) -> list[Record]:
        self._check(rows)
        return [self._read_image(row) for row in rows.tolist()]

    def _read_image(self, row: int) -> Record:
        try:
            source = self._group.open(row)
            content = source.read(0, source.size)
        except BadDataError as error:
            raise BadDataError(error.file, error.cause, row, error.hint) from error
        if not is_image(bytes(content[:16])):
            cause = "it is no image" if len(content) else "the file is empty"
            raise BadDataError(source.url, cause, row)
        path = self._group.facts["paths"][row]
        record: Record = {"image": content, "path": path}
        if self._labels:
            name = path.partition("/")[0]
            record |= {"class": name, "label": self._labels[name]}
        return record
