"""Fake tensors, with shapes and dtypes but without storage, and process groups without communication."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, is_fake
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

__all__ = ["FakeStore", "FakeTensor", "fake_tensor_mode", "is_fake"]

FAKE_BACKEND = "fake"
"""Name of the backend of groups whose operations return at once, whatever their size."""

_LOG = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Enter a mode in which new tensors are torch's fake tensors, and others are treated as such.

    Failures are reported by their exception alone: torch's log would repeat them.
    """
    was_disabled, _LOG.disabled = _LOG.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        _LOG.disabled = was_disabled
