from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.command import Desk


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A session sets this process's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, modules=tmp_path)
