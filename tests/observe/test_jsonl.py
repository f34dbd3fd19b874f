"""The files of a run: valid JSON, every step once, whole lines only."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.sinks.jsonl import (
    AppendFile,
    JsonLinesSink,
    drop_steps,
    drop_torn_lines,
    last_record,
    to_json_line,
)

Record = Callable[..., dict[str, Any]]


def write_steps(run: RunDirectory, record: Record, first: int, last: int) -> None:
    sink = JsonLinesSink()
    sink.open(run, first)
    for step in range(first, last + 1):
        sink.write({"kind": "step", **record(step)})
    sink.close()


def steps_of(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def test_a_resumed_run_has_every_step_once(run: RunDirectory, step_record: Record) -> None:
    write_steps(run, step_record, 1, 57)
    write_steps(run, step_record, 41, 60)
    assert steps_of(run) == list(range(1, 61))


def test_a_run_started_anew_begins_with_an_empty_file(run: RunDirectory, step_record: Record) -> None:
    write_steps(run, step_record, 1, 5)
    write_steps(run, step_record, 1, 2)
    assert steps_of(run) == [1, 2]


@pytest.mark.parametrize("torn", [b'{"step": 4, "lo', b'{"step": 4}', b"\n", b"\0" * 5000 + b"\n", b"[3]\n"])
def test_what_a_kill_leaves_of_the_last_line_is_dropped(
    torn: bytes, run: RunDirectory, step_record: Record
) -> None:
    write_steps(run, step_record, 1, 3)
    with run.metrics.open("ab") as file:
        file.write(torn)
    write_steps(run, step_record, 4, 5)
    assert steps_of(run) == [1, 2, 3, 4, 5]


def test_history_is_kept_but_for_a_torn_line(run: RunDirectory) -> None:
    sink = JsonLinesSink()
    sink.open(run, 1)
    sink.write({"kind": "validation", "step": 90, "loss": 2.0})
    sink.close()
    with run.events.open("ab") as file:
        file.write(b'{"kind": "mess')
    sink.open(run, 51)
    sink.write({"kind": "start", "step": 50})
    sink.close()
    assert [json.loads(line)["kind"] for line in run.events.read_text().splitlines()] == [
        "validation",
        "start",
    ]


@given(st.lists(st.integers(1, 200_000), min_size=0, max_size=12), st.integers(0, 13), st.binary(max_size=30))
def test_trimming_keeps_exactly_the_lines_before_the_first_step(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], first: int, torn: bytes
) -> None:
    run = RunDirectory(tmp_path_factory.mktemp("trim"))
    path = run.metrics
    lines = [to_json_line({"step": step, "text": "x" * size}) for step, size in enumerate(sizes)]
    path.write_bytes(b"".join(lines) + torn.replace(b"\n", b""))
    last = last_record(path)
    assert (last["step"] if last is not None else -1) == len(lines) - 1
    assert last_record(path.with_name("none")) is None
    drop_torn_lines(path)
    assert path.read_bytes() == b"".join(lines)
    drop_steps(run, first)
    assert path.read_bytes() == b"".join(lines[:first])


def test_nan_and_infinity_become_null_and_are_named() -> None:
    line = to_json_line(
        {"loss": math.nan, "phases": {"data": -math.inf, "optimizer": 0.5}, "list": [1.0, math.inf]}
    )
    assert json.loads(line, parse_constant=pytest.fail) == {
        "loss": None,
        "phases": {"data": None, "optimizer": 0.5},
        "list": [1.0, None],
        "non_finite": {"loss": "nan", "phases.data": "-inf", "list.1": "inf"},
    }


@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.floats() | st.text() | st.none(), lambda inner: st.lists(inner, max_size=3)),
    )
)
def test_every_record_is_one_line_of_strict_json(record: dict[str, Any]) -> None:
    line = to_json_line(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert set(json.loads(line, parse_constant=pytest.fail)) - {"non_finite"} == set(record) - {"non_finite"}


def test_a_run_directory_that_cannot_be_written_is_named(run: RunDirectory) -> None:
    run.metrics.mkdir()
    with pytest.raises(WanmaError, match=r"metrics\.jsonl"):
        JsonLinesSink().open(run, 1)


@pytest.mark.root
def test_a_full_disk_leaves_whole_lines_and_no_more(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    try:
        file = AppendFile(place / "lines")
        line = b"x" * 6999 + b"\n"
        with pytest.raises(OSError, match="No space left"):
            write_often(file, line)
        size = (place / "lines").stat().st_size
        assert size > 0
        assert size % len(line) == 0
        file.close()
    finally:
        subprocess.run(["umount", str(place)], check=True)


def write_often(file: AppendFile, line: bytes) -> None:
    for _ in range(100):
        file.write(line)
