"""CSV: quotes, delimiters, headers, and rows of another number of fields."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data_files import in_memory
from wanma.data.formats.csv_rows import Csv
from wanma.data.formats.format import BadDataError

FIELDS = st.text(alphabet='ab",;\t \n\r馬1', max_size=8)


def read(data_format: Csv, content: bytes, name: str = "a.csv") -> list[dict[str, Any]]:
    group = in_memory(name, content)
    layout = data_format.scan(group)
    return data_format.open(group, layout).read(np.arange(layout.rows))


@given(
    st.lists(st.lists(FIELDS, min_size=2, max_size=2), max_size=8),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
)
def test_rows_are_those_of_python_s_csv(
    rows: list[list[str]], delimiter: str, end: str, quoting: int
) -> None:
    if (end, quoting) == ("\n", csv.QUOTE_MINIMAL):  # csv itself does not read back what it writes then
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([["a", "b"], *rows])
    found = read(
        Csv(delimiter=delimiter, header=True),
        text.getvalue().encode(),
    )
    assert found == [dict(zip(("a", "b"), row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"user,item\n1,2\n", {"user": "1", "item": "2"}),
        (b"1::1193::5::978300760\n", {"0": "1", "1": "1193", "2": "5", "3": "978300760"}),
        (b"196\t242\t3\n186\t302\t3\n", {"0": "196", "1": "242", "2": "3"}),
        (b"a;b\r\nx;\r\n", {"a": "x", "b": ""}),
        (b"prompt,answer\nWho is it?,me\nprompt 2,me\n", {"prompt": "Who is it?", "answer": "me"}),
        (b"year,Is it a good movie?\n1996,yes\n1997,no\n", {"year": "1996", "Is it a good movie?": "yes"}),
        (b'a,b\n5" disk,3\n', {"a": '5" disk', "b": "3"}),
        (b'a,b\n"x\n\n y",3\n', {"a": "x\n\n y", "b": "3"}),
    ],
)
def test_delimiter_and_header_are_found(content: bytes, expected: dict[str, str]) -> None:
    assert read(Csv(), content)[0] == expected


@pytest.mark.parametrize(
    ("content", "row", "cause"),
    [
        (b"a,b\n1,2\n1,2,3\n", 1, "3 fields, but the file has 2 columns"),
        (b"a,b\n1,2\n\xff,2\n", 1, "invalid UTF-8 at its byte 0"),
        (b'a,b\n1,2\n"x"y,2\n', 1, "damaged quotes"),
        (b'a,b\n1,2\n"x,2\n', 2, "a quote is not closed"),
        (b"a,a\n1,2\n", None, "two of its columns have the same name"),
        (b"a\0,b\n1,2\n", None, "a zero byte"),
        (b"so good,positive\nso bad,negative\nfine,positive\n", 0, "'positive' comes again in its column"),
        (b"Is it good?\tyes\nNo way\tno\n", 0, "'Is it good\\?' is a sentence"),
        (b"this is what I say,x\nand that,y\n", 0, "is a sentence"),
    ],
)
def test_damaged_rows_are_named(content: bytes, row: int | None, cause: str) -> None:
    with pytest.raises(BadDataError, match=cause) as raised:
        read(Csv(), content)
    assert raised.value.row == row


def test_a_first_line_that_looks_like_data_is_read_as_the_option_says() -> None:
    content = b"so good,positive\nso bad,positive\n"
    with pytest.raises(BadDataError) as raised:
        read(Csv(), content)
    assert "--option header=false" in raised.value.hint
    assert read(Csv(header=False), content)[0] == {"0": "so good", "1": "positive"}
    assert read(Csv(header=True), content) == [{"so good": "so bad", "positive": "positive"}]


def test_without_quoting_quotes_are_ordinary() -> None:
    assert read(Csv(quoted=False), b'a\tb\n"x\ty\n', "a.tsv") == [{"a": '"x', "b": "y"}]
