"""Programs of Slurm whose answers are recorded ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of programs that come first."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder
