"""Comparison of a command's output with the output that a page shows."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LEFT_OUT = "..."
_MOST_WRAPPED = 8
"""Lines into which a page may wrap one."""


def mismatch(shown: Sequence[str], printed: str) -> str | None:
    """Return what is wrong with the shown output, or None if the command printed it.

    `...` alone stands for any number of lines, within a line for any text. Spaces count as one, and blank
    lines do not count: widths of columns vary with the values that a page leaves out. A printed line may be
    wrapped into several.
    """
    lines = [plain for line in printed.splitlines() if (plain := _plain(line))]
    parts: list[list[str]] = [[]]
    for line in filter(None, map(_plain, shown)):
        if line == _LEFT_OUT:
            parts.append([])
        else:
            parts[-1].append(line)
    place = 0
    for number, part in enumerate(parts):
        is_first, is_last = number == 0, number == len(parts) - 1
        starts = [place] if is_first else range(place, len(lines) + 1)
        must_end = is_last and bool(part)
        ends = (_end(part, lines, start, must_end) for start in starts)
        end = next((end for end in ends if end is not None), None)
        if end is None:
            return _difference(part, lines, place, must_end)
        place = end
    return None


def _end(part: list[str], lines: list[str], start: int, must_end: bool) -> int | None:
    """Return the place after `part` where it stands at `start`; a page may wrap a long line into several."""
    if not part:
        return None if must_end and start < len(lines) else start
    if start == len(lines):
        return None
    for count in range(1, min(len(part), _MOST_WRAPPED) + 1):
        if _line_matches(" ".join(part[:count]), lines[start]):
            end = _end(part[count:], lines, start + 1, must_end)
            if end is not None:
                return end
    return None


def _line_matches(shown: str, printed: str) -> bool:
    pattern = ".*".join(re.escape(text.strip()) for text in shown.split(_LEFT_OUT))
    return re.fullmatch(pattern, printed) is not None


def _difference(part: list[str], lines: list[str], place: int, must_end: bool) -> str:
    """Say which line is wrong."""
    if must_end and any(_end(part, lines, start, False) is not None for start in range(place, len(lines))):
        return f"printed lines are not shown after: {part[-1]}"
    for count in range(1, len(part) + 1):
        if all(_end(part[:count], lines, start, False) is None for start in range(place, len(lines) + 1)):
            return f"shown, but not printed there: {part[count - 1]}"
    return f"printed lines are not shown before: {part[0]}"


def _plain(line: str) -> str:
    return " ".join(line.split())
