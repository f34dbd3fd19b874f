"""Durations as people write them: 90s, 30m, 2h."""

from __future__ import annotations

import re

from wanma.job.errors import EXIT_USAGE, WanmaError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|d|)")


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as 90s, 30m, 1h30m; a number alone is in seconds.

    Raises:
        WanmaError: it is none.
    """
    compact = text.replace(" ", "")
    matches = list(_PART.finditer(compact))
    seconds = sum(float(match[1]) * _UNITS[match[2]] for match in matches)
    if "".join(match[0] for match in matches) != compact or seconds <= 0:
        raise WanmaError(f"'{text}' is not a duration", "write 90s, 30m or 1h30m", EXIT_USAGE)
    return seconds
