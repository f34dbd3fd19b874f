"""Fake tensors: tensors with shapes and dtypes, but without storage."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensorMode

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensor_mode() -> Iterator[FakeTensorMode]:
    """Enter a mode in which new tensors are torch's fake tensors, and others are treated as such.

    Failures are reported by their exception alone: torch's log would repeat them.
    """
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _LOG.disabled = was_disabled
