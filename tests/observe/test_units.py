"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bytes_text(0), "0 B"),
        (bytes_text(1536), "1.5 KiB"),
        (bytes_text(120 * 2**20), "120 MiB"),
        (bytes_text(141e9), "131 GiB"),
        (bytes_text(None), "–"),
        (duration_text(0.012), "12 ms"),
        (duration_text(0.0997), "0.10 s"),
        (duration_text(0.456), "0.46 s"),
        (duration_text(59.4), "59 s"),
        (duration_text(185), "3 min 05 s"),
        (duration_text(3720), "1 h 02 min"),
        (duration_text(4 * 86400), "4 d 00 h"),
        (duration_text(math.nan), "–"),
        (number_text(6844.2), "6,844"),
        (number_text(2.34567), "2.346"),
        (number_text(0.001), "0.001000"),
        (number_text(1.234e-5), "1.23e-05"),
        (number_text(0), "0"),
        (percent_text(0.4832), "48.3 %"),
        (count_text(1, "step"), "1 step"),
        (count_text(1200, "step"), "1,200 steps"),
    ],
)
def test_numbers_read_well(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats() | st.none())
def test_no_number_breaks_a_text(value: float | None) -> None:
    assert all(text(value) for text in (bytes_text, number_text, percent_text))
    if value is None or not value < 0:
        assert duration_text(value)
