"""Benchmarks adopt orphans; tests after them find their process as it was."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from wanma.bench.meter.process_tree import PR_SET_CHILD_SUBREAPER


@pytest.fixture(autouse=True)
def _no_subreaper_after_the_test() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
