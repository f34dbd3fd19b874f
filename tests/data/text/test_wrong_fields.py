"""Fields that a corpus lacks: refused or told, whatever the cache holds."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from support.text_formats import build_token_file
from wanma.data.opening import prepare_job_data
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of two plain texts and one file of records without the field."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text("plain text " * 20)
    (folder / "c.jsonl").write_text('{"body": "one"}\n')
    return folder


def test_a_wrong_field_is_refused_although_a_token_file_of_the_same_documents_exists(
    corpus: Path, tmp_path: Path
) -> None:
    built = build_token_file([corpus], tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(JobError, match=r"c\.jsonl .* 'text'; .* are body"):
            build_token_file([corpus / "*.txt", corpus / "*.jsonl"], tmp_path / "cache")
    assert build_token_file([corpus], tmp_path / "cache").folder == built.folder


def test_a_csv_without_header_is_plain_text_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("plain text " * 20)
    (folder / "b.csv").write_text("so good, it is\nso bad, it was\nso fine, it is\n")
    assert build_token_file([folder], tmp_path / "cache").header["documents"] == 2
    with pytest.raises(JobError, match=r"b\.csv .* 'text'; .* are so good"):
        build_token_file([folder / "b.csv"], tmp_path / "cache")


def test_arrays_that_a_glob_names_are_read_although_a_folder_has_left_them_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 50)
    np.save(tmp_path / "b.npy", np.array([[97, 98, 256]], "i4"))
    assert build_token_file([tmp_path], tmp_path.parent / "cache").header["documents"] == 1
    globs = [f"{tmp_path}/*.txt", f"{tmp_path}/*.npy"]
    assert build_token_file(globs, tmp_path.parent / "cache").header["documents"] == 2


def test_records_read_as_plain_text_are_told_at_each_preparation(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = DataSection(
        text=[str(corpus)], cache=str(tmp_path / "cache"), sequence_length=8, validation_fraction=0
    )
    build_token_file([corpus], tmp_path / "cache")
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare_job_data(section)
        assert caplog.text.count("c.jsonl, have no field 'text'; their fields are body") == 1
        assert "data.text[0]: 1 files" in caplog.text
        assert "they are read as plain text" in caplog.text


@pytest.mark.parametrize(
    ("suffix", "content"), [("csv", "id,body\n1,one\n"), ("json", '[{"id": 1, "body": "one"}]')]
)
def test_tables_without_the_field_that_are_most_of_a_folder_are_refused(
    tmp_path: Path, suffix: str, content: str
) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "README.md").write_text("about the tables")
    for number in range(3):
        (folder / f"{number}.{suffix}").write_text(content)
    with pytest.raises(JobError, match=r"no field 'text'; .* id, body") as error:
        build_token_file([folder], tmp_path / "cache")
    assert "data.columns" in error.value.hint
