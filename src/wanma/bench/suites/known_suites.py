"""Suites that have a name: those that are shipped."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the shipped suites."""


def known_suites() -> dict[str, Path]:
    """Return the files of all suites by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
