"""Detection of the format of files by their content, and the formats that are known.

A package adds formats of its own by entry points of the group `wanma.formats`: each names a subclass of
`Format` that needs no arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from urllib.parse import unquote, urlsplit

from wanma.data.formats.arrays import Cifar, Idx, NumpyArrays
from wanma.data.formats.arrow_tables import ArrowTables, Parquet
from wanma.data.formats.compression import detect_compression, plain_head, plain_name
from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.format import BadDataError, Certainty, DataFile, Format, Probe
from wanma.data.formats.hugging_face import HuggingFaceDataset
from wanma.data.formats.image_folder import ImageFolder
from wanma.data.formats.json_records import JsonLines, JsonList
from wanma.data.formats.megatron import Megatron
from wanma.data.formats.tar_samples import TarSamples
from wanma.data.formats.text import TextDocuments, TextLines
from wanma.data.formats.tfrecord import TFRecord
from wanma.job.errors import WanmaError, did_you_mean

ENTRY_POINT_GROUP = f"{__name__.partition('.')[0]}.formats"
"""Group of entry points of formats in other packages: `wanma.formats`."""
_HEAD_BYTES = 64 << 10
_COMPRESSED_HEAD_BYTES = 1 << 20
"""Bytes of a compressed file that are read: its first block, which some compressions decode as a whole."""
_TAIL_BYTES = 64
_BUILT_IN: tuple[type[Format], ...] = (
    Parquet,
    ArrowTables,
    HuggingFaceDataset,
    TarSamples,
    TFRecord,
    Megatron,
    NumpyArrays,
    Idx,
    Cifar,
    ImageFolder,
    JsonLines,
    JsonList,
    TextDocuments,
    TextLines,
    Csv,
)
"""Formats that come with wanma; of several with equal certainty and suffix, the first is taken."""


def known_formats() -> dict[str, Format]:
    """Return all formats with their usual options, by name.

    Raises:
        WanmaError: an entry point cannot be loaded, is no format, or takes a name that is in use.
    """
    return dict(_known_formats())


@cache
def _known_formats() -> dict[str, Format]:
    formats: dict[str, Format] = {kind.name: kind() for kind in _BUILT_IN}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        place = f"the entry point {entry.name} = {entry.value} in {ENTRY_POINT_GROUP}"
        try:
            extension = entry.load()()
        except Exception as error:  # a foreign module may raise anything
            raise WanmaError(f"{place} cannot be loaded: {error}", "correct or remove its package") from error
        if not isinstance(extension, Format):
            raise WanmaError(f"{place} is no subclass of wanma.data.formats.format.Format")
        if extension.name in formats:
            raise WanmaError(f"{place} takes the name '{extension.name}', which another format has")
        formats[extension.name] = extension
    return formats


def format_named(name: str) -> Format:
    """Return the format with this name and its usual options.

    Raises:
        WanmaError: there is none.
    """
    formats = known_formats()
    if name not in formats:
        raise WanmaError(
            f"there is no data format '{name}'.{did_you_mean(name, formats)}",
            f"the formats are {', '.join(sorted(formats))}",
        )
    return formats[name]


def is_built_in(data_format: Format) -> bool:
    """Return True for a format that comes with wanma; False: one of another package."""
    return type(data_format) in _BUILT_IN


def detect_format(files: Sequence[DataFile]) -> Format:
    """Detect the format that all `files` are to have.

    Files that describe others, such as `state.json` of a saved data set, decide first; else the first file
    that is not empty decides. The scan refuses files of another format.

    Raises:
        WanmaError: all files are empty, or the content has no known format.
    """
    formats = known_formats().values()
    for file in files:
        marked = [one for one in formats if _matches(file, one.markers)]
        if marked and file.size:
            probe = probe_file(file)
            for one in marked:
                if one.detect(probe) is Certainty.SURE:
                    return one
    filled = next((file for file in files if file.size), None)
    if filled is None:
        if len(files) > 1:
            raise WanmaError(f"all {len(files)} files are empty, such as '{files[0].url}'")
        raise WanmaError(f"'{files[0].url}' is empty" if files else "there is no file")
    probe = probe_file(filled)
    if found := best_format(probe, formats):
        return found
    raise BadDataError(
        filled.url,
        f"its content has no known format; it begins with {probe.head[:16]!r}",
        hint=f"the formats are {', '.join(sorted(known_formats()))}",
    )


def best_format(probe: Probe, formats: Iterable[Format]) -> Format | None:
    """Return the format of highest certainty, the suffix decides between equals; None: no format fits."""
    ranked = [(one.detect(probe), probe.ends_with(*one.suffixes), one) for one in formats]
    certainty, _, best = max(ranked, key=lambda entry: entry[:2])
    return best if certainty else None


def probe_file(file: DataFile) -> Probe:
    """Read the first and last bytes of a file, the first ones decompressed."""
    source = file.open()
    name = unquote(urlsplit(file.url).path if "://" in file.url else file.url).rpartition("/")[2].lower()
    head = bytes(source.read(0, _HEAD_BYTES))
    if compression := detect_compression(head):
        if source.size > len(head):
            head = bytes(source.read(0, _COMPRESSED_HEAD_BYTES))
        return Probe(plain_name(name), plain_head(head, compression, _HEAD_BYTES), b"", -1)
    tail = bytes(source.read(max(source.size - _TAIL_BYTES, 0), source.size))
    return Probe(name, head, tail, source.size)


def _matches(file: DataFile, patterns: Sequence[str]) -> bool:
    name = file.url.rpartition("/")[2]
    return any(fnmatchcase(name, pattern) for pattern in patterns)
