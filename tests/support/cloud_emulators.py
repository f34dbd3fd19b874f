"""Emulators of Google Cloud Storage and Azure Blob Storage (make emulators), each behind a proxy that fails.

Azure's is Azurite, of Microsoft; Google's is gcp-storage-emulator.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from support.faulty_proxy import FaultyProxy, faulty_proxy
from support.networks import free_port

FOLDER = Path(__file__).parents[2] / ".venv-emulators"
PYTHON = FOLDER / "bin" / "python"
"""Interpreter that has gcsfs, adlfs and Google's emulator beside wanma."""
AZURITE = FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
SERVE_GOOGLE = """
import sys
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="box").run()
"""
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's published key of its account devstoreaccount1."""


@dataclass(frozen=True)
class CloudStore:
    """Emulator with an empty bucket or container `box`."""

    url: str
    """URL of the bucket."""
    environment: dict[str, str]
    """Environment in which its library finds it."""
    proxy: FaultyProxy
    """Proxy between clients and the emulator."""


@contextmanager
def cloud_store(protocol: str, folder: Path) -> Iterator[CloudStore]:
    """Start the emulator of `gs` or `abfs`; its output lies in `folder`."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with (folder / "emulator.log").open("wb") as log:
        server = subprocess.Popen(_command(protocol, port), stdout=log, stderr=log, cwd=folder)
    try:
        _wait_until_it_answers(address, server)
        with faulty_proxy(address) as proxy:
            yield CloudStore(f"{protocol}://box", _environment(protocol, proxy.url), proxy)
    finally:
        server.kill()
        server.wait()


def _command(protocol: str, port: int) -> list[str]:
    if protocol == "gs":
        return [str(PYTHON), "-c", SERVE_GOOGLE, str(port)]
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    return ["node", str(AZURITE), "--blobPort", str(port), *options]


def _environment(protocol: str, url: str) -> dict[str, str]:
    if protocol == "gs":
        return {"STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
    account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={KEY}"
    return {"AZURE_STORAGE_CONNECTION_STRING": f"{account};BlobEndpoint={url}/devstoreaccount1;"}


def _wait_until_it_answers(address: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urlopen(address, timeout=5).close()
        except HTTPError:
            return
        except (URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
