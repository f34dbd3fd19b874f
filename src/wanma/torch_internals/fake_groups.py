"""Process groups without communication: the backend with which torch tests its own collectives."""

from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

__all__ = ["FakeStore"]

FAKE_BACKEND = "fake"
"""Name of the backend: operations of its groups return at once, whatever their size."""
