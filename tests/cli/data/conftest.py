"""Fixture of the tests of `wanma data`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data_command import DataCommand


@pytest.fixture
def data(tmp_path: Path) -> DataCommand:
    return DataCommand(tmp_path)
