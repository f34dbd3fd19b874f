"""Fixtures of the data room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.s3_server import S3Server, s3_server


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as server:
        yield server
