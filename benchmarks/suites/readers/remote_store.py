"""S3 server beside a reader, and the environment in which the libraries find it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LATENCY_SECONDS = 0.03
BYTES_PER_SECOND = 8e6
SMALL_BYTES_PER_SECOND = 100e6
"""Rate with `--small`, with which a test waits for nothing."""


@dataclass(frozen=True)
class RemoteStore:
    """Running server.

    Args:
        endpoint: its address.
        process: number of its process.
        cache: empty folder in which the reader may keep what it has downloaded.
        bytes_per_second: rate of its link.
    """

    endpoint: str
    process: int
    cache: Path
    bytes_per_second: float


@contextmanager
def remote_store(options: argparse.Namespace, folder: Path) -> Iterator[RemoteStore]:
    """Serve the folders in `folder` as buckets, with nothing downloaded yet."""
    rate = SMALL_BYTES_PER_SECOND if options.small else BYTES_PER_SECOND
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("s3_server.py"), folder, str(LATENCY_SECONDS), str(rate)],
        stdout=subprocess.PIPE,
        text=True,
    )
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=options.folder))
    try:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield RemoteStore(endpoint, server.pid, cache, rate)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(cache, ignore_errors=True)
