"""The kind of a path by its content, formats that the job names, and what contradicts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from support.chats import CHATML, conversations, write_chats, write_tokenizer
from support.labelled_images import WRITERS
from wanma.data.data_kinds import with_data_kinds
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError
from wanma.job.file.loading import load_job, to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=2, global_batch=4)


def resolved(**data: Any) -> DataSection:
    job = to_job({"model": {"preset": "gpt-1m"}, "data": json.loads(json.dumps(data, default=str))})
    found = with_data_kinds(job)
    return found.data


def write_lines(path: Path, **record: Any) -> Path:
    path.write_text("".join(json.dumps({**record, "n": n}) + "\n" for n in range(300)))
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_images_of_each_format_are_known_by_their_content_and_read_as_by_their_short_name(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    WRITERS[name](tmp_path / "data", 30)
    keys = {"cache": tmp_path / "cache", "validation_fraction": 0}
    section = resolved(path=tmp_path / "data", **keys)
    assert section.content == "images"
    short = open_dataset(resolved(images=tmp_path / "data", **keys), TRAIN)
    data = open_dataset(section, TRAIN)
    assert data.fingerprint == short.fingerprint
    assert data.batch([0, 1]).inputs[0].equal(short.batch([0, 1]).inputs[0])


def test_the_kind_of_data_in_parts_is_that_of_the_entries_that_this_node_has(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    WRITERS["images"](tmp_path / "here", 30)
    entries = [str(tmp_path / "elsewhere"), str(tmp_path / "here")]
    section = resolved(path=entries, placement="parts")
    assert (section.content, section.path) == ("images", entries)


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"text": "some words"}, {}),
        ({"input_ids": [1, 2, 3]}, {"tokens": "input_ids"}),
        ({"messages": None}, {"messages": "messages"}),
    ],
)
def test_records_are_text_tokens_or_conversations_by_the_name_of_their_field(
    record: dict[str, Any], columns: dict[str, str], tmp_path: Path
) -> None:
    path = write_lines(tmp_path / "part.jsonl", **record)
    if "messages" in record:
        write_chats(path, conversations(40))
    section = resolved(
        path=path,
        tokenizer=write_tokenizer(tmp_path / "tokenizer", CHATML),
        cache=tmp_path / "cache",
        sequence_length=200,
    )
    assert section.content == "text"
    assert section.columns.model_dump(exclude_none=True, exclude_defaults=True) == columns
    assert open_dataset(section, TRAIN).train_samples > 0


def test_plain_text_and_folders_of_it_are_text(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("words\n" * 300)
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert resolved(path=tmp_path / "notes.txt").kind == "text"
    assert resolved(path=tmp_path).kind == "text"
    assert resolved(path="stdlib").kind == "text"


def test_what_a_sample_is_unclear_of_is_one_message_with_the_columns(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data\.path.*body, n"):
        resolved(path=write_lines(tmp_path / "part.jsonl", body="words"))
    section = resolved(
        path=write_lines(tmp_path / "part.jsonl", body="words"),
        columns={"text": "body"},
        sequence_length=16,
        cache=tmp_path / "cache",
    )
    assert open_dataset(section, TRAIN).train_samples > 0


def test_a_path_that_is_not_here_stays_open_and_reading_it_names_the_key(tmp_path: Path) -> None:
    section = resolved(path=tmp_path / "missing")
    assert section.kind is None
    with pytest.raises(JobError, match=r"data\.path"):
        open_dataset(section, TRAIN)


@pytest.mark.parametrize(
    ("data_format", "key"), [("jsnol", "jsonl"), ("parquet", "contradicts"), ("images", "images")]
)
def test_a_format_that_is_unknown_or_contradicts_the_content_is_one_message(
    data_format: str, key: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        resolved(text=write_lines(tmp_path / "part.jsonl", text="a"), format=data_format)
    assert "data.format" in caught.value.message
    assert key in str(caught.value)


def test_a_format_overrules_the_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "records", text="words " * 20)
    as_records = resolved(path=path, sequence_length=16, cache=tmp_path / "cache")
    as_text = resolved(path=path, format="text", sequence_length=16, cache=tmp_path / "cache")
    assert as_text.content == "text"
    records, text = open_dataset(as_records, TRAIN), open_dataset(as_text, TRAIN)
    assert text.describe()["documents"] == 1
    assert records.describe()["documents"] == 300


def test_columns_name_image_and_class(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "own.npz", scan=pixels, finding=np.arange(20) % 4, other=np.zeros(3))
    section = resolved(
        path=tmp_path / "own.npz",
        columns={"image": "scan", "target": "finding"},
        cache=tmp_path / "cache",
        validation_fraction=0,
        shuffle="none",
    )
    data = open_dataset(section, TRAIN)
    assert data.classes == 4
    assert data.batch([0, 1, 5]).targets.tolist() == [0, 1, 1]
    wrong = resolved(path=tmp_path / "own.npz", columns={"image": "scan", "target": "nothing"})
    with pytest.raises(JobError, match=r"data\.columns") as caught:
        open_dataset(wrong.model_copy(update={"cache": str(tmp_path / "cache")}), TRAIN)
    assert "finding" in caught.value.hint


def test_sources_by_path_are_one_kind_by_their_content_and_survive_the_file(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", conversations(20))
    notes = write_lines(tmp_path / "part.jsonl", text="words " * 9)
    table = pa.table({"a": [1.0, 2.0], "y": [0, 1]})
    pq.write_table(table, tmp_path / "table.parquet")
    sources = [
        {"name": "a", "path": [str(chats)]},
        {"name": "b", "path": [str(notes)], "format": "jsonl", "weight": 2.0},
    ]
    job = with_data_kinds(to_job({"model": {"preset": "gpt-1m"}, "data": {"sources": sources}}))
    first, second = job.data.sources
    assert (first.columns.messages, second.columns.messages) == ("messages", None)
    (tmp_path / "job.toml").write_text(job_to_toml(job))
    assert load_job(tmp_path / "job.toml", ["observe.name="]).data.sources == job.data.sources
    tables = {
        "name": "t",
        "path": [str(tmp_path / "table.parquet")],
        "columns": {"features": ["a"], "target": "y"},
    }
    with pytest.raises(JobError, match=r"data\.sources"):
        resolved(sources=[*sources, tables])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"path": "a", "text": "b"}, None),
        ({"path": "a", "kind": "images", "columns": {"text": "x"}}, None),
        ({"images": "a", "columns": {"messages": "x"}}, None),
        ({"path": "a", "kind": "table"}, None),
        ({"path": "a", "columns": {"features": ["x"]}}, None),
        ({"path": "a", "columns": {"text": "x", "tokens": "y"}}, None),
        ({"path": "a", "columns": {"text": "x", "target": "y"}}, None),
        ({"path": "a", "columns": {"text": "x", "target_type": "class"}}, None),
        ({"path": "a", "columns": {"text": "x", "sparse": ["y"]}}, None),
        ({"path": "a", "columns": {"user": "x", "target": "y"}}, None),
        ({"path": "a", "columns": {"user": "x", "item": "x"}}, None),
        ({"path": "a", "columns": {"dense": ["x"]}, "placement": "parts"}, None),
        ({"path": "a", "kind": "interactions", "bad_data": "substitute"}, None),
        ({"sources": [{"name": "a", "path": "b", "kind": "interactions"}]}, None),
        ({"factory": "a:b", "kind": "text"}, None),
        ({"format": "jsonl"}, None),
        ({"sources": [{"name": "a", "path": "b"}], "columns": {"text": "x"}}, None),
        ({"path": "a", "columns": {"features": ["x"], "target": "y"}, "placement": "parts"}, None),
        ({"sources": [{"name": "a"}]}, "'a' needs one of path, text, images, factory"),
        ({"sources": [{"name": "a", "text": "x", "images": "y"}]}, r"\(given: text and images\)"),
        (
            {"sources": [{"name": "a", "text": "x"}, {"name": "b", "images": "y"}]},
            r"\(text: a, images: b\)",
        ),
        ({"sources": [{"name": "a", "images": "y", "columns": {"text": "t"}}]}, "images says images"),
        ({"sources": [{"name": "a", "text": "y", "class_names": ["t"]}]}, "class_names has no effect"),
        ({"sources": [{"name": "a", "images": "y", "class_names": ["x", "x"]}]}, "class_names has x twice"),
        ({"images": "a", "image_transform": {"augment": ["random_resized_crop"]}}, "crop needs a size"),
        ({"images": "a", "image_transform": {"mean": [0.5, 0.5]}}, "mean has 2 values"),
        ({"images": "a", "image_transform": {"std": [0.0]}}, "each std must be > 0"),
        ({"factory": "a:b", "placement": "parts"}, "needs entries of text or images"),
        ({"sources": [{"name": "a", "text": "b"}], "placement": "parts"}, "needs entries of text or images"),
        ({"placement": "parts"}, "needs entries of text or images"),
        ({"text": "a", "bad_data": "substitute"}, "use 'skip'"),
        (
            {"path": "a", "columns": {"features": ["x"], "target": "y"}, "bad_data": "substitute"},
            "use 'skip'",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused_in_the_job(
    data: dict[str, Any], message: str | None
) -> None:
    with pytest.raises(ValidationError, match=message):
        DataSection.model_validate(data)
