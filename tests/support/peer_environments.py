"""Python environments of the shipped suites: links to those of `make peers` and `make frameworks`."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PLACES = {
    "peers": REPOSITORY / ".venv-peers",
    "deepspeed": REPOSITORY / ".venv-peers",
    "tensorflow": REPOSITORY / ".venv-frameworks" / "tensorflow",
}
"""Environment of the repository by the name that suites give it."""


def link_environments(folder: Path) -> Path:
    """Make links to those that exist in a new folder, and return it."""
    folder.mkdir()
    for name, place in PLACES.items():
        if (place / "bin" / "python").exists():
            (folder / name).symlink_to(place)
    return folder
