"""moto's S3 server over HTTP, in this process, behind a proxy that can fail."""

from __future__ import annotations

import functools
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.faulty_proxy import FaultyProxy, faulty_proxy

BUCKET = "bucket"


class S3Server:
    """One empty bucket of a real S3 API.

    Attributes:
        proxy: proxy between clients and the server.
    """

    def __init__(self, proxy: FaultyProxy) -> None:
        self.proxy = proxy
        self._client = _moto_client()
        reset = urllib.request.Request(f"{_moto_address()}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, name: str, content: bytes) -> str:
        """Write an object past the proxy, and return its URL."""
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)
        return f"s3://{BUCKET}/{name}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which s3fs finds the proxy."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server that this process and its children use for s3://."""
    import s3fs

    from wanma.data.stores import client

    with faulty_proxy(_moto_address()) as proxy:
        s3 = S3Server(proxy)
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        client.forget_clients()
        try:
            yield s3
        finally:
            client.forget_clients()
            s3fs.S3FileSystem.clear_instance_cache()


@functools.cache
def _moto_address() -> str:
    """Address of moto's server, which serves all tests of this process: its start costs more than most."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


@functools.cache
def _moto_client() -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=_moto_address(),
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )
