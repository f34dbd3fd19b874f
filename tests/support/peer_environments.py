"""Python environments of the shipped suites: links to those of `make peers` and `make frameworks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PLACES = {
    "peers": REPOSITORY / ".venv-peers",
    "deepspeed": REPOSITORY / ".venv-peers",
    "tensorflow": REPOSITORY / ".venv-frameworks" / "tensorflow",
}
"""Environment of the repository by the name that suites give it."""
PEERS = PLACES["peers"] / "bin" / "python"
"""Interpreter with Accelerate, DeepSpeed, Lightning and TRL; it exists after `make peers`."""
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
DEEPSPEED_VARIABLES = {
    "DS_ACCELERATOR": "cpu",
    # A kernel is compiled at the first use, which takes a minute: for all tests in one place, that of torch.
    "TORCH_EXTENSIONS_DIR": f"{_CACHE}/torch_extensions/py{sys.version_info[0]}{sys.version_info[1]}_cpu",
}
"""Environment variables of processes of DeepSpeed."""


def link_environments(folder: Path) -> Path:
    """Make links to those that exist in a new folder, and return it."""
    folder.mkdir()
    for name, place in PLACES.items():
        if (place / "bin" / "python").exists():
            (folder / name).symlink_to(place)
    return folder
