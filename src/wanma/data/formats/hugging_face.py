"""Data sets that Hugging Face `datasets` has saved with `save_to_disk`.

Those that it stores as Parquet files are read as Parquet. An `IterableDataset` is a program, not stored data:
it has no number of samples and no samples at a position, so that only its order of reading can be kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wanma.data.formats.arrow_tables import ArrowTables
from wanma.data.formats.format import BadDataError, Certainty, DataFile, FileGroup, Probe

_DESCRIPTIONS = ("state.json", "dataset_info.json", "dataset_dict.json")


@dataclass(frozen=True)
class HuggingFaceDataset(ArrowTables):
    """Folders of `Dataset.save_to_disk`, or one split of `DatasetDict.save_to_disk`: rows of their tables.

    `state.json` gives the order of the files. Features such as images are mappings of `bytes` and `path`.

    Args:
        split: name of the split; empty: the folder has only one.
    """

    split: str = ""
    name: ClassVar[str] = "huggingface"
    suffixes: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ("state.json",)

    def detect(self, probe: Probe) -> Certainty:
        is_state = probe.name == "state.json" and b'"_data_files"' in probe.head
        return Certainty.SURE if is_state else Certainty.NO

    def group(self, files: Sequence[DataFile]) -> list[FileGroup]:
        by_url = {file.url: file for file in files}
        states = [url for url in by_url if url.rpartition("/")[2] == "state.json"]
        if self.split:
            states = [url for url in states if url.split("/")[-2:-1] == [self.split]]
        if len(states) != 1:
            splits = sorted({url.split("/")[-2] for url in by_url if url.endswith("/state.json")})
            cause = (
                f"it holds {len(splits)} splits: {', '.join(splits)}" if splits else "state.json is missing"
            )
            raise BadDataError(
                files[0].url.rpartition("/")[0] if files else "",
                cause,
                hint="name the folder of one split, or set the option `split`",
            )
        (state,) = states
        folder = state.rpartition("/")[0]
        groups = []
        for name in _read_data_files(by_url[state]):
            if f"{folder}/{name}" not in by_url:
                raise BadDataError(f"{folder}/{name}", "this file is missing", hint="save the data set again")
            groups.append(FileGroup((by_url[f"{folder}/{name}"],)))
        named = {group.url for group in groups}
        for url in by_url:
            if (
                url.startswith(f"{folder}/")
                and url not in named
                and url.rpartition("/")[2] not in _DESCRIPTIONS
            ):
                raise BadDataError(url, "state.json does not name it", hint="remove it from the folder")
        return groups


def _read_data_files(file: DataFile) -> list[str]:
    """Return the names of the files with the rows, in their order."""
    try:
        source = file.open()
        state = json.loads(bytes(source.read(0, source.size)))
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise BadDataError(
                file.url,
                "it selects and orders its rows by a table of indices",
                hint="save the data set after flatten_indices()",
            )
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadDataError(file.url, f"damaged description of a data set: {error}") from error
