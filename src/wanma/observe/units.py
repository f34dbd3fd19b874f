"""Texts of numbers for people, used by the console and by the report."""

from __future__ import annotations

import math
import re

MISSING_TEXT = "–"
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DURATION_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)")


def bytes_text(value: float | None) -> str:
    """Return a number of bytes as text, such as '1.5 GiB'."""
    if value is None or not math.isfinite(value):
        return MISSING_TEXT
    exponent = 0
    while abs(value) >= 1024 and exponent < len(BYTE_UNITS) - 1:
        value /= 1024
        exponent += 1
    return (
        f"{value:.0f} B" if exponent == 0 else f"{value:.{1 if value < 100 else 0}f} {BYTE_UNITS[exponent]}"
    )


def duration_text(seconds: float | None) -> str:
    """Return a duration as text: '12 ms', '0.45 s', '12 s', '3 min 05 s', '1 h 02 min', '3 d 04 h'."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING_TEXT
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 10:
        return f"{seconds:.2f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60:02d} min"
    return f"{total // 86400} d {total % 86400 // 3600:02d} h"


def parse_duration(text: str) -> float | None:
    """Return the seconds of a text such as '90s', '30m', '1h30m', or '90'; None: it is no duration."""
    compact = text.replace(" ", "")
    parts = list(_DURATION_PART.finditer(compact))
    if not parts or "".join(part[0] for part in parts) != compact:
        return None
    return sum(float(part[1]) * _DURATION_UNITS[part[2]] for part in parts)


def number_text(value: float | None) -> str:
    """Return a number with four significant digits: '6,844', '2.345', '1.2e-05'."""
    if value is None or not math.isfinite(value):
        return MISSING_TEXT
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e9 or size < 1e-3:
        return f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"


def percent_text(value: float | None) -> str:
    """Return a share of one as text, such as '48.3 %'."""
    return MISSING_TEXT if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def count_text(number: int, noun: str) -> str:
    """Return a count as text, such as '1 step' or '1,200 steps'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
