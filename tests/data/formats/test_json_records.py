"""JSON lines and lists: positions of rows, rows that are no objects, texts that look like structure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data_files import in_memory, one_group
from wanma.data.formats import byte_ranges
from wanma.data.formats.format import BadDataError, Format, Probe
from wanma.data.formats.json_records import JsonLines, JsonList

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},:\n\u00e9馬 '),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=3)
    ),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.text(alphabet='"\\]x'), VALUES, max_size=3), max_size=6)


def read(data_format: Format, content: bytes) -> list[dict[str, Any]]:
    group = in_memory("a.json", content)
    layout = data_format.scan(group)
    return data_format.open(group, layout).read(np.arange(layout.rows))


@given(
    OBJECTS,
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from(["", "\n", " \t\r\n"]),
)
def test_a_list_is_cut_into_its_elements(
    objects: list[dict[str, Any]],
    indent: int | None,
    ascii_only: bool,
    chunk: int,
    space: str,
) -> None:
    text = space + json.dumps(objects, indent=indent, ensure_ascii=ascii_only) + space
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "CHUNK_BYTES", chunk)
        assert read(JsonList(), text.encode()) == objects


@given(OBJECTS, st.integers(1, 40), st.sampled_from(["\n", "\r\n", "\n\n", "\n \t\r\n"]), st.booleans())
def test_lines_are_found_across_chunks(
    objects: list[dict[str, Any]],
    chunk: int,
    end: str,
    with_mark: bool,
) -> None:
    text = ("\ufeff" if with_mark else "") + "".join(
        json.dumps(one, ensure_ascii=False) + end for one in objects
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "CHUNK_BYTES", chunk)
        assert read(JsonLines(), text.encode()) == objects


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b"[1, 2]", "a list of JSON"),
        (b"7", "a number of JSON"),
        (b'{"a": "\xff"}', "invalid UTF-8 at its byte 7"),
        (b'{"a": ', "Expecting value"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"nonsense", "Expecting value"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_row(tmp_path: Path, line: bytes, cause: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    layout = JsonLines().scan(one_group(path))
    reader = JsonLines().open(one_group(path), layout)
    with pytest.raises(BadDataError, match="row 1: ") as raised:
        reader.read(np.arange(3))
    assert (raised.value.file, raised.value.row) == (str(path), 1)
    assert cause in raised.value.cause
    assert reader.read(np.array([2, 0])) == [{"a": 2}, {"a": 1}]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "it holds no list"),
        (b'{"a": 1}', "does not begin with a list"),
        (b'[{"a": 1}', "the file ends 1 levels deep"),
        (b'[{"a": "1', "ends inside a text"),
        (b'[{"a": 1}] [', "the end of the list, at byte 11"),
        (b'[{"a": 1}]]', "the end of the list, at byte 10"),
        (b'[{"a": "\0"}]', "a zero byte at 8"),
    ],
)
def test_a_damaged_list_is_refused(content: bytes, cause: str) -> None:
    with pytest.raises(BadDataError, match=cause.replace("[", r"\[")):
        read(JsonList(), content)


def test_an_element_that_is_no_object_is_named() -> None:
    with pytest.raises(BadDataError, match="row 1: a text of JSON"):
        read(JsonList(), b'[{"a": 1}, "b"]')


def test_a_first_line_longer_than_what_is_looked_at_is_found_by_the_suffix() -> None:
    head = b'{"a": "' + b"x" * 100
    assert JsonLines().detect(Probe("a.jsonl", head, b"", 1000))
    assert not JsonLines().detect(Probe("a.txt", head, b"", 1000))
