"""Fake tensors: tensors with shapes and dtypes, but without storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wanma.torch_internals.fake_tensors import FakeTensorMode, without_fake_tensor_log


@contextmanager
def fake_tensor_mode() -> Iterator[FakeTensorMode]:
    """Enter a mode in which new tensors are torch's fake tensors, and others are treated as such.

    Failures are reported by their exception alone: torch's log would repeat them.
    """
    with without_fake_tensor_log(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode
