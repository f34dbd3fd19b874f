"""Generated part of docs/results/recovery-faults.md."""

from __future__ import annotations

import datetime
from importlib.metadata import version

from benchmarks.common import ROOT, machine

PAGE = ROOT / "docs" / "results" / "recovery-faults.md"


def write(text: str, marker: str) -> None:
    """Write `text` between the two comments of the page that have `marker`."""
    PAGE.write_text(replaced(PAGE.read_text(), text, marker))


def replaced(page: str, text: str, marker: str) -> str:
    """Return `page` with `text` between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    before, begin, rest = page.partition(f"<!-- {marker} -->\n")
    _, end, after = rest.partition(f"<!-- /{marker} -->")
    if not (begin and end):
        raise ValueError(f"no <!-- {marker} --> ... <!-- /{marker} --> in the page")
    return f"{before}{begin}\n{text}\n{end}{after}"


def where_and_when() -> str:
    return f"{machine()}; torch {version('torch')}; {datetime.date.today()}"
