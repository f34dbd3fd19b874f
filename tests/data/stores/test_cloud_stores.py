"""Google's and Azure's storage by their own libraries: emulators over HTTP, behind a proxy that fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cloud_emulators import AZURITE, KEY, PYTHON, CloudStore, cloud_store
from support.faulty_proxy import Fault, Request
from wanma.job.run.run_directory import RunDirectory

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not AZURITE.exists(), reason="without emulators of stores: make emulators"),
    pytest.mark.skipif(shutil.which("node") is None, reason="Azurite needs node"),
]
JOB = """
[model]
family = "decoder"
layers = 1
hidden = 16
heads = 2
[data]
text = "{url}/folder"
sequence_length = 32
validation_fraction = 0.0
[train]
steps = {steps}
global_batch = 4
[checkpoint]
every_steps = 5
upload = "{url}/run"
"""
PUT = """
import sys, fsspec
filesystem, path = fsspec.core.url_to_fs(sys.argv[1])
if sys.argv[1].startswith("abfs"):
    filesystem.mkdir("box")
for name in range(2):
    filesystem.pipe_file(f"{path}/folder/{name}.txt", b"ten thousand horses\\n" * (500 + name))
"""
READ = """
import json, sys
from wanma.data.stores.listing import list_files
from wanma.data.stores.remote_file import RemoteFile
from wanma.data.stores.client import store_traffic
from wanma.job.retry import RetryPolicy
files = list_files([sys.argv[1] + "/folder"], "data.text")
retry = RetryPolicy(max_attempts=4, initial_backoff_seconds=0.01, deadline_seconds=60)
parts = RemoteFile(files[1], retry).read_ranges([(9000, 9020), (0, 4)])
print(json.dumps([[file.size for file in files], [bytes(part).decode() for part in parts]]))
"""
CLAIM = """
import json, sys
from wanma.elastic.claims.object_claims import ObjectClaims
from wanma.job.run.generation_claims import Claim
claims = ObjectClaims(sys.argv[1] + "/claims")
claims.check_usable()
claim = lambda name: Claim(1, name, name, "host", 0)
print(json.dumps([claims.create(claim("first")), claims.create(claim("second"))]))
"""


@pytest.fixture(params=["gs", "abfs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CloudStore]:
    with cloud_store(request.param, tmp_path) as store:
        run(store, tmp_path, "-c", PUT, store.url)
        yield store


def run(store: CloudStore, folder: Path, *words: str, code: int = 0) -> str:
    """Run Python in the environment of the store; returns its output."""
    ran = subprocess.run(
        [PYTHON, *words],
        cwd=folder,
        env={**os.environ, **store.environment, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout if code == 0 else ran.stderr


def test_ranges_are_read_though_the_store_fails_at_first(store: CloudStore, tmp_path: Path) -> None:
    left = [Fault(503), Fault(500)]
    store.proxy.fault = lambda request: left.pop() if left and is_read(request) else None
    sizes, parts = json.loads(run(store, tmp_path, "-c", READ, store.url))
    text = "ten thousand horses\n" * 501
    assert sizes == [10_000, 10_020]
    assert parts == [text[9000:9020], text[:4]]
    assert left == []


def is_read(request: Request) -> bool:
    names = {name.lower() for name in request.headers}
    return request.method == "GET" and bool(names & {"range", "x-ms-range"})


def test_a_training_reads_uploads_and_goes_on_from_there(store: CloudStore, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    losses = []
    for steps in (5, 8):
        job.write_text(JOB.format(url=store.url, steps=steps))
        output = run(store, tmp_path, "-m", "wanma", "train", "job.toml", "--run-dir", "run")
        lines = RunDirectory(tmp_path / "run").metrics.read_text().splitlines()
        losses.append([json.loads(line)["step"] for line in lines])
        shutil.rmtree(tmp_path / "run")
    assert losses == [[1, 2, 3, 4, 5], [6, 7, 8]], output


def test_of_two_coordinators_one_claims_a_run(store: CloudStore, tmp_path: Path) -> None:
    if store.url.startswith("abfs"):
        assert json.loads(run(store, tmp_path, "-c", CLAIM, store.url)) == [True, False]
    else:  # this emulator ignores the condition of the request, which is noticed
        assert "no conditional create" in run(store, tmp_path, "-c", CLAIM, store.url, code=1)
        assert any("ifGenerationMatch=0" in request.path for request in store.proxy.requests)


def test_a_missing_bucket_and_a_refusal_are_one_message_without_the_key(
    store: CloudStore, tmp_path: Path
) -> None:
    other = store.url.replace("box", "other")
    missing = run(store, tmp_path, "-m", "wanma", "data", "inspect", f"{other}/folder", code=2)
    assert other in missing
    store.proxy.fault = lambda _: Fault(403, b"denied")
    refused = run(store, tmp_path, "-m", "wanma", "data", "inspect", f"{store.url}/folder", code=1)
    for text in (missing, refused):
        assert "Traceback" not in text
        assert KEY not in text
