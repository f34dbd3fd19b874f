"""Files of a command: what cannot be opened once is not remembered as damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.data.formats.csv_rows import Csv
from wanma.data.index.records import open_records
from wanma.data.stores import remote_file
from wanma.data.stores.byte_source import ByteSource
from wanma.data.stores.listing import StoredFile
from wanma.data.tools.selection import FormatChoice, parse_option, select_entries
from wanma.job.errors import JobError, WanmaError


def test_a_file_that_cannot_be_opened_once_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = tmp_path / "in", tmp_path / "cache"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text("".join(f'{{"id": {row}}}\n' for row in range(10)))
    open_file = remote_file.open_file

    def fail_once(file: StoredFile) -> ByteSource:
        if file.path.endswith("b.jsonl"):
            raise WanmaError(f"'{file.url}': too many open files", "raise the limit")
        return open_file(file)

    selection = select_entries([str(folder)], FormatChoice("jsonl"), str(cache))
    with monkeypatch.context() as patch:
        patch.setattr(remote_file, "open_file", fail_once)
        index = selection.sources[0].open_index(selection.cache_folder, skip_damaged=True)
    assert index.rows == 10
    records = open_records(str(folder), "jsonl", cache=cache, skip_damaged=True)
    assert (len(records), records.damaged) == (20, ())


@pytest.mark.parametrize(("text", "expected"), [("false", False), ("False", False), ("null", None)])
def test_an_option_is_json_or_a_word_of_python(text: str, expected: bool | None) -> None:
    choice = FormatChoice("csv", dict([parse_option(f"header={text}")]))
    assert choice.of([]) == Csv(header=expected)


@pytest.mark.parametrize(
    ("name", "option"),
    [("csv", "header=no"), ("csv", "delimiter=3"), ("megatron", "unit=row"), ("parquet", "columns=3")],
)
def test_an_option_of_another_type_is_named(name: str, option: str) -> None:
    with pytest.raises(JobError, match=f"--option {option.partition('=')[0]}=.*'{name}'") as raised:
        FormatChoice(name, dict([parse_option(option)])).of([])
    assert "as JSON" in raised.value.hint


def test_a_list_of_an_option_becomes_a_tuple() -> None:
    choice = FormatChoice("parquet", dict([parse_option('columns=["a", "b"]')]))
    assert choice.of([]).options["columns"] == ("a", "b")


@pytest.mark.parametrize("entry", ["s3://me:p4ss@bucket/x", "https://host/x?X-Amz-Signature=p4ss"])
def test_a_password_in_an_address_is_refused_and_not_repeated(entry: str) -> None:
    with pytest.raises(JobError, match=r"DATA\[1\]: the address holds a password") as raised:
        select_entries(["here", entry], FormatChoice(), None)
    assert "p4ss" not in f"{raised.value.message}{raised.value.hint}"
