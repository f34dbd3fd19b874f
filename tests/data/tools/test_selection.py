"""Files of a command: what cannot be opened once is not remembered as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.data.index.records import open_records
from wanma.data.stores import data_file
from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.listing import StoredFile
from wanma.data.tools.selection import FormatChoice, select_entries
from wanma.job.errors import WanmaError


def test_a_file_that_cannot_be_opened_once_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "in", tmp_path / "cache"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(f'{{"id": {row}}}\n' for row in range(10)))
    open_file = data_file.open_file

    def fail_once(file: StoredFile) -> ByteSource:
        if file.path.endswith("b.jsonl"):
            raise WanmaError(f"'{file.url}': too many open files", "raise the limit")
        return open_file(file)

    selection = select_entries([str(folder)], FormatChoice("jsonl"), str(cache))
    with monkeypatch.context() as patch:
        patch.setattr(data_file, "open_file", fail_once)
        index = selection.sources[0].open_index(selection.cache_folder, skip_damaged=True)
    assert index.rows == 10
    records = open_records(str(folder), "jsonl", cache=cache, skip_damaged=True)
    assert (len(records), records.damaged) == (20, ())
