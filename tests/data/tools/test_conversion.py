"""Conversions beside each other and after each other, without the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from wanma.data.tools import conversion
from wanma.data.tools.conversion import Conversion, convert_data
from wanma.data.tools.selection import DataSelection, FormatChoice, select_entries
from wanma.data.tools.shard_conversion import ConversionOptions
from wanma.job.errors import JobError


@pytest.fixture
def selection(tmp_path: Path) -> DataSelection:
    (tmp_path / "a.jsonl").write_text("".join('{"text": "one two"}\n' for _ in range(100)))
    return select_entries([str(tmp_path / "a.jsonl")], FormatChoice(), str(tmp_path / "cache"))


def convert(selection: DataSelection, out: Path, **options: Any) -> Conversion:
    return convert_data(
        selection, ConversionOptions(**{"format": "jsonl", **options}), out, shard_bytes=500, processes=1
    )


def test_the_result_of_another_process_that_ended_just_now_is_taken(
    selection: DataSelection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = conversion.locked_folder

    def lock_late(*arguments: Any) -> Any:
        monkeypatch.setattr(conversion, "locked_folder", lock)
        convert(selection, tmp_path / "out")
        return lock(*arguments)

    monkeypatch.setattr(conversion, "locked_folder", lock_late)
    done = convert(selection, tmp_path / "out")
    assert done.rows == 100
    assert done.resumed_shards == done.shards
    assert not (tmp_path / "out.partial").exists()


def test_shards_of_two_tokenizers_are_not_joined(
    selection: DataSelection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"

    def save(**vocabulary: int) -> None:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(path))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    save(**{"<unk>": 0, "one": 1, "two": 2})
    options = {"format": "megatron", "tokenizer": str(path)}
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_conclude", fail)
        with pytest.raises(KeyboardInterrupt):
            convert(selection, tmp_path / "out", **options)
    save(**{"<unk>": 0, "two": 1, "one": 2})
    with pytest.raises(JobError, match="holds an unfinished conversion"):
        convert(selection, tmp_path / "out", **options)
