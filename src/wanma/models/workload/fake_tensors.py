"""Tensors with shapes and types, but without storage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def without_storage() -> Iterator[FakeTensorMode]:
    """Inside, new tensors are torch's fake tensors, and others count as such.

    What fails so is told by its exception alone: torch's log would show it as well.
    """
    before, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _LOG.disabled = before
