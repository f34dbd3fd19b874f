"""Measurement of a job's text before its preparation: missing bytes, rate, origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.s3_server import s3_server
from wanma.data import opening
from wanma.data.opening import prepare_job_data, text_preparation
from wanma.data.text.preparation_measurement import encoding_rate
from wanma.data.text.tokenizer import BytesTokenizer
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.sections.data import DataSection

PIECE = b"some words of a text\n" * 100
SIZE = len(PIECE) * 2500
"""Bytes of a file that is large enough to be measured."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    path.write_bytes(PIECE * 2500)
    return path


def section(path: Path, **keys: object) -> DataSection:
    return DataSection(text=[str(path)], cache=str(path.parent.parent / "cache"), **keys)  # type: ignore[arg-type]


def test_text_without_a_token_file_is_missing_until_it_is_prepared(text: Path) -> None:
    found = text_preparation(section(text))
    assert (found.text_bytes, found.missing_bytes, found.is_remote) == (SIZE, SIZE, False)
    assert found.bytes_per_second > 0
    assert found.rate_origin == "measured on this machine on the first bytes of the largest file"
    announced: list[TextPreparation] = []
    prepare_job_data(section(text), announce=announced.append)
    assert [one.missing_bytes for one in announced] == [SIZE]
    later = text_preparation(section(text))
    assert (later.text_bytes, later.missing_bytes, later.store) == (SIZE, 0, None)


def test_records_are_measured_by_their_text(text: Path) -> None:
    lines = text.with_suffix(".jsonl")
    line = json.dumps({"id": "x" * 5000, "text": "short"}).encode() + b"\n"
    lines.write_bytes(line * 2000)
    found = text_preparation(section(lines))
    assert found.bytes_per_second is not None
    assert found.missing_bytes == len(line) * 2000


def test_a_small_text_is_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "text" / "a.txt"
    path.parent.mkdir()
    path.write_bytes(PIECE)
    found = text_preparation(section(path))
    assert (found.missing_bytes, found.bytes_per_second) == (len(PIECE), None)


def test_text_that_is_not_here_is_a_reason(tmp_path: Path) -> None:
    found = text_preparation(section(tmp_path / "nowhere" / "a.txt"))
    assert "nowhere" in found.fault


def test_a_store_that_does_not_answer_in_time_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MEASURE_SECONDS", 0.01)  # less than a process takes to start
    found = text_preparation(DataSection(text=["http://127.0.0.1:9/a.txt"], cache=str(tmp_path)))
    assert found.fault == "the store did not answer within 0.01 s; data.probe_store=false asks it nothing"


def test_a_store_that_is_not_to_be_probed_is_not_asked(tmp_path: Path) -> None:
    url = ["http://127.0.0.1:9/a.txt"]
    found = text_preparation(DataSection(text=url, cache=str(tmp_path), probe_store=False))
    assert found.fault == "data.probe_store = false"


def test_text_in_a_store_is_measured_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "_MEASURE_SECONDS", 600.0)
    with s3_server(monkeypatch) as server:
        server.put("a.txt", PIECE * 2500)
        keys = DataSection(text=["s3://bucket/a.txt"], cache=str(tmp_path / "cache"))
        found = text_preparation(keys)
        assert (found.missing_bytes, found.is_remote, found.fault) == (SIZE, True, "")
        assert found.bytes_per_second is not None
        assert found.store.origin.startswith("measured by a probe on ")
        announced: list[TextPreparation] = []
        prepare_job_data(keys, announce=announced.append)
        assert [one.missing_bytes for one in announced] == [SIZE]


def test_a_preparation_that_nobody_listens_to_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server(monkeypatch) as server:
        server.put("a.txt", PIECE * 2500)
        keys = DataSection(text=["s3://bucket/a.txt"], cache=str(tmp_path / "cache"))
        prepare_job_data(keys)
        assert (tmp_path / "cache" / "tokens").is_dir()
        assert not (tmp_path / "cache" / "rates").exists()


@pytest.mark.parametrize("keys", [{}, {"text": ["stdlib"]}, {"images": ["a"]}, {"factory": "a:b"}])
def test_other_data_have_no_preparation_to_forecast(keys: dict[str, object]) -> None:
    assert text_preparation(DataSection(**keys)) is None  # type: ignore[arg-type]


def test_the_rate_counts_stored_bytes_on_the_clock() -> None:
    ticks = iter(range(100))

    def pieces() -> Iterator[tuple[int, bytes]]:
        for _ in range(3):
            yield 1000, b"abc"

    def clock() -> float:
        return 0.01 * next(ticks)

    # Start at 0, a look after each piece, and the end: four ticks later.
    assert encoding_rate(pieces(), BytesTokenizer(), clock) == pytest.approx(3000 / 0.04)
    assert encoding_rate(iter(()), BytesTokenizer(), clock) is None
