"""Rows of conversations: against plain Python, in every order, at any world size, and what is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chats import Row, conversations, tokens_of, write_chats, write_tokenizer
from support.grids import rotated
from support.killed_runs import BLOCK, SHUFFLES, TOTAL, TRAIN, WINDOW, order_keys, read_with_kills
from support.reference_order import reference_order
from support.table_files import write_table
from wanma.data.batch import IGNORE_INDEX
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.sections.data import DataSection

LENGTH = 300
CHATS = conversations(40)


def write_jsonl(folder: Path, chats: Sequence[Any]) -> Path:
    return write_chats(folder / "chats.jsonl", chats)


WRITERS: dict[str, Callable[[Path, Sequence[Any]], Path]] = {
    "jsonl": write_jsonl,
    "parquet": lambda folder, chats: write_table(
        folder / "chats.parquet", [{"messages": chat} for chat in chats]
    ),
    "arrow": lambda folder, chats: write_table(
        folder / "chats.arrow", [{"messages": json.dumps(chat)} for chat in chats]
    ),
}


def reference_rows(rows: Sequence[Row], packing: bool, end: int) -> list[list[int]]:
    """The targets of each row: whole conversations in their order, filled up by what is no target."""
    packed: list[Row] = []
    for row in rows:
        if packing and packed and len(packed[-1]) + len(row) <= LENGTH + 1:
            packed[-1] = packed[-1] + row
        else:
            packed.append(row)
    filled = [row + [(end, False)] * (LENGTH + 1 - len(row)) for row in packed]
    return [[token if told else IGNORE_INDEX for token, told in row[1:]] for row in filled]


def section_of(tmp_path: Path, path: Path, **keys: Any) -> DataSection:
    return DataSection.model_validate(
        {
            "path": str(path),
            "columns": {"messages": "messages"},
            "tokenizer": str(write_tokenizer(tmp_path / "tokenizer")),
            "sequence_length": LENGTH,
            "validation_fraction": 0,
            "cache": str(tmp_path / "cache"),
            **keys,
        }
    )


@pytest.mark.parametrize(("name", "shuffle"), rotated(WRITERS, SHUFFLES))
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "rows"])
def test_chats_of_each_format_are_read_in_the_order_of_the_reference(
    name: str, shuffle: str, packing: bool, tmp_path: Path
) -> None:
    path = WRITERS[name](tmp_path, CHATS)
    section = section_of(tmp_path, path, chat={"packing": packing}, **order_keys(shuffle))
    prepare_job_data(section)
    tokenizer = load_tokenizer(section.tokenizer)
    rows = reference_rows(
        [tokens_of(tokenizer, chat) for chat in CHATS], packing, tokenizer.end_of_document_id
    )
    assert len(rows) == 40 or packing
    found = read_with_kills(lambda: open_dataset(section, TRAIN))
    order = reference_order([len(rows)], [(0, [1])], (shuffle, BLOCK, WINDOW), TRAIN.seed, TOTAL)
    assert found == [(sample, tuple(rows[row])) for sample, (_, row) in enumerate(order)]


def test_targets_are_those_of_the_answers_alone(tmp_path: Path) -> None:
    data = open_dataset(section_of(tmp_path, write_jsonl(tmp_path, CHATS)), TRAIN)
    count = int((data.batch(range(data.train_samples)).targets != IGNORE_INDEX).sum())
    answers = [m["content"] for chat in CHATS for m in chat if m["role"] == "assistant"]
    (source,) = data.describe()["sources"]
    assert count == source["targets"] == sum(len(text.encode()) + 1 for text in answers)


def test_inputs_hold_the_whole_conversation_and_masks_part_those_of_a_row(tmp_path: Path) -> None:
    section = section_of(tmp_path, write_jsonl(tmp_path, CHATS), shuffle="none", document_masks=True)
    batch = open_dataset(section, TRAIN).batch([0])
    tokenizer = load_tokenizer(section.tokenizer)
    lengths = [len(tokens_of(tokenizer, chat)) for chat in CHATS]
    count = int(np.searchsorted(np.cumsum(lengths), LENGTH + 1, side="right"))
    assert count > 1
    documents = batch.keywords["documents"][0].tolist()
    filled = [number for number, length in enumerate(lengths[:count]) for _ in range(length)]
    assert documents == (filled + [count] * LENGTH)[:LENGTH]
    first = [token for token, _ in tokens_of(tokenizer, CHATS[0])]
    assert batch.inputs[0][0, : len(first)].tolist() == first
    assert batch.keywords["positions"][0, : len(first)].tolist() == list(range(len(first)))


@pytest.mark.parametrize(("too_long", "rows"), [("cut", 40), ("skip", 38)])
def test_conversations_longer_than_a_row_are_cut_or_left_out_and_counted(
    too_long: str,
    rows: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("wanma"), "handlers", [logging.StreamHandler()])
    chats = [
        *CHATS[:38],
        *([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 999}],) * 2,
    ]
    section = section_of(
        tmp_path, write_jsonl(tmp_path, chats), shuffle="none", chat={"packing": False, "too_long": too_long}
    )
    prepare_job_data(section)
    assert "2 of 40" in capfd.readouterr().err  # another process prepares records, forked or not
    data = open_dataset(section, TRAIN)
    assert data.train_samples == rows
    (source,) = data.describe()["sources"]
    assert source["conversations_too_long"] == 2
    if too_long == "cut":
        assert data.batch([39]).targets[0, -1].item() == ord("a")


def test_a_conversation_longer_than_a_row_is_an_error_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    section = section_of(tmp_path, write_jsonl(tmp_path, CHATS), sequence_length=20)
    with pytest.raises(WanmaError, match=r"data\.chat\.too_long"):
        prepare_job_data(section)


def test_a_share_of_conversations_is_for_validation_whatever_the_seed(tmp_path: Path) -> None:
    section = section_of(
        tmp_path, write_jsonl(tmp_path, CHATS), validation_fraction=0.2, chat={"packing": False}
    )
    data = open_dataset(section, TRAIN)
    assert data.train_samples + data.validation_samples == 40
    assert 0 < data.validation_samples < 20
    train = {tuple(row) for row in data.batch(range(data.train_samples)).targets.tolist()}
    validation = {
        tuple(row) for row in data.validation_batch(range(data.validation_samples)).targets.tolist()
    }
    assert not train & validation
    few = section_of(
        tmp_path,
        write_chats(tmp_path / "few.jsonl", CHATS[:2]),
        validation_fraction=1e-9,
        chat={"packing": False},
    )
    assert (open_dataset(few, TRAIN).train_samples, open_dataset(few, TRAIN).validation_samples) == (1, 1)
    one = section_of(tmp_path, write_chats(tmp_path / "one.jsonl", CHATS[:1]), validation_fraction=0.5)
    with pytest.raises(WanmaError):
        open_dataset(one, TRAIN)


def test_bad_conversations_are_refused_or_left_out_and_listed(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path, [CHATS[0], [{"role": "user", "content": "no answer"}], CHATS[1], "text", None]
    )
    with pytest.raises(WanmaError, match="row 1"):
        prepare_job_data(section_of(tmp_path, path))
    data = open_dataset(section_of(tmp_path, path, bad_data="skip", chat={"packing": False}), TRAIN)
    assert data.train_samples == 2
    assert [row for _, row, _ in data.describe()["sources"][0]["bad_rows"]["listed"]] == [1, 3, 4]


@pytest.mark.parametrize("name", ["text", "column", "template"])
def test_what_holds_no_conversations_is_one_message(name: str, tmp_path: Path) -> None:
    path, keys = write_jsonl(tmp_path, CHATS), {}
    if name == "text":
        path = tmp_path / "notes.txt"
        path.write_text("plain text\n" * 100)
    elif name == "column":
        keys = {"columns": {"messages": "turns"}}
    else:
        keys = {"tokenizer": "bytes"}
    with pytest.raises(WanmaError) as caught:
        prepare_job_data(section_of(tmp_path, path, **keys))
    assert ("messages" if name == "column" else "data.columns.messages") in caught.value.message


def test_another_template_is_another_token_file(tmp_path: Path) -> None:
    section = section_of(tmp_path, write_jsonl(tmp_path, CHATS))
    first = open_dataset(section, TRAIN).fingerprint
    template = (Path(section.tokenizer) / "tokenizer_config.json").read_text().replace("im_start", "user")
    (Path(section.tokenizer) / "tokenizer_config.json").write_text(template)
    assert open_dataset(section, TRAIN).fingerprint != first


def test_several_processes_encode_the_same_conversations(tmp_path: Path) -> None:
    from wanma.data.documents.text_files import list_documents
    from wanma.data.text.encoding_task import ReadingSettings
    from wanma.data.text.token_file import open_or_build_token_file

    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer"))
    files = list_documents([str(write_chats(tmp_path / f"{n}.jsonl", CHATS[n::3])) for n in range(3)])
    settings = ReadingSettings("messages", is_chat=True)
    built = [
        open_or_build_token_file(files, tokenizer, tmp_path / f"cache-{count}", None, count, settings)
        for count in (1, 2)
    ]
    assert built[0].fingerprint == built[1].fingerprint
    assert built[0].header["targets"] == built[1].header["targets"] > 0
