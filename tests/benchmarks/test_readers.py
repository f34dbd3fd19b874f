"""Suites of readers: their files, the checks of what is read, and the readers whose libraries are here."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.server_thread import ServerThread
from wanma.bench.suites.suite_file import SuiteFile, make_suite, read_suite_file
from wanma.job.errors import WanmaError

SUITES = Path(__file__).resolve().parents[2] / "benchmarks" / "suites"
READERS = SUITES / "readers"
NAMES = (
    "read-tokens", "resume-tokens", "first-batch", "read-images", "read-json", "read-parquet", "read-tar-s3",
    "order",
)  # fmt: skip
SCRIPTS = (
    "tokens/wanma_tokens.py",
    "tokens/torch_tokens.py",
    "images/wanma_images.py",
    "images/torch_images.py",
    "json_lines/wanma_json.py",
    "json_lines/torch_json.py",
    "parquet/wanma_parquet.py",
    "parquet/torch_parquet.py",
    "remote/wanma_s3.py",
)
"""Readers whose libraries are those of wanma."""

Import = Callable[[str], Any]


@pytest.fixture
def reader_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Function that imports a module of the readers, which find each other in their folder."""
    monkeypatch.syspath_prepend(str(READERS))
    before = set(sys.modules)
    yield importlib.import_module
    names = {path.stem for path in READERS.glob("*.py")}
    for name in names & (sys.modules.keys() - before):
        del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_names_readers_that_exist(name: str) -> None:
    suite = make_suite(name, read_suite_file(SUITES / f"{name}.toml"), SUITES)
    assert len(suite.contenders) >= 5
    for contender in suite.contenders:
        script = Path(contender.command[1].replace("{suite}", str(SUITES)))
        assert script.is_file(), script
        assert contender.name.startswith("wanma") == (contender.python_environment is None)


def test_every_reader_is_in_a_suite() -> None:
    named = {
        word.removeprefix("{suite}/readers/")
        for name in NAMES
        for contender in read_suite_file(SUITES / f"{name}.toml").contenders
        for word in contender.command
        if word.endswith(".py")
    }
    scripts = {path.relative_to(READERS).as_posix() for path in READERS.glob("*/*.py")}
    assert scripts - {"order/order_timing.py"} == named


@pytest.fixture
def windows() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 50, (12, 9))


def _batches(windows: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, len(windows), 4):
        rows = torch.from_numpy(windows[start : start + 4])
        yield rows[:, :-1], rows[:, 1:]


def test_sequences_may_come_in_any_order_and_only_once(reader_module: Import, windows: np.ndarray) -> None:
    content = reader_module("contents").TokenWindows(lambda: iter(windows), 12, 100.0)
    content.check(_batches(windows[::-1].copy()))
    twice, changed = windows.copy(), windows.copy()
    twice[3] = twice[4]
    changed[5, 2] += 1
    for wrong in (twice, changed):
        with pytest.raises(AssertionError, match="not those of the data"):
            content.check(_batches(wrong))
    with pytest.raises(AssertionError, match="next tokens"):
        content.check((inputs, inputs) for inputs, _ in _batches(windows))


def test_tokens_of_blocks_are_counted(reader_module: Import, windows: np.ndarray) -> None:
    counts = np.bincount(windows.ravel(), minlength=50)
    content = reader_module("contents").TokenCounts(lambda: counts, 12, 100.0, 0.1)
    content.check(_batches(windows))
    content.check(_batches(windows[:11]))  # 9 of 108 tokens are a remainder
    for found, fact in ((windows[:10], "missing"), (np.concatenate([windows, windows[:4]]), "do not have")):
        with pytest.raises(AssertionError, match=fact):
            content.check(_batches(found))


def test_images_are_told_by_their_labels_and_their_range(reader_module: Import) -> None:
    content = reader_module("contents").LabelledImages(lambda: [0, 1, 1], 3, 100.0)
    pixels, labels = torch.randn(3, 3, 4, 4).clamp(-2, 2), torch.tensor([1, 0, 1])
    content.check([(pixels, labels)])
    for wrong in (
        (pixels, torch.tensor([1, 0, 0])),
        (torch.zeros(3, 3, 4, 4), labels),
        (pixels * 100, labels),
    ):
        with pytest.raises(AssertionError):
            content.check([wrong])


def test_documents_are_packed_with_their_ends(reader_module: Import) -> None:
    found = list(reader_module("contents").packed([np.array([1, 2, 3]), np.array([4, 5])], 9, 2))
    assert [window.tolist() for window in found] == [[1, 2, 3], [3, 9, 4], [4, 5, 9]]
    blocks = list(reader_module("text_data").Packer(3).add([[1, 2, 3], [4, 5]], 9))
    assert [block.tolist() for block in blocks] == [[1, 2, 3], [9, 4, 5]]


def test_the_link_carries_its_rate_whoever_reads(
    reader_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, now = reader_module("s3_server"), [100.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    link = server.Link(0.03, 1000.0)
    for _ in range(8):
        link.wait_for(250)
    assert now[0] == pytest.approx(102.0)
    now[0] = 110.0  # the link was idle, and does not catch up
    link.wait_for(500)
    assert now[0] == pytest.approx(110.5)


def test_the_store_answers_as_s3_does(reader_module: Import, tmp_path: Path) -> None:
    server = reader_module("s3_server")
    (tmp_path / "bucket" / "part").mkdir(parents=True)
    (tmp_path / "bucket" / "part" / "a.tar").write_bytes(bytes(range(100)))
    (tmp_path / "secret").write_bytes(b"no object")
    thread = ServerThread(server.handler(tmp_path, server.Link(0.0, 1e9)))
    try:
        url = f"http://127.0.0.1:{thread.port}/bucket"
        listed = urllib.request.urlopen(f"{url}?list-type=2&prefix=part/").read().decode()
        assert re.findall("<Key>(.*?)</Key>.*<Size>(.*?)</Size>", listed) == [("part/a.tar", "100")]
        folders = urllib.request.urlopen(f"{url}?list-type=2&prefix=&delimiter=/").read().decode()
        assert "<CommonPrefixes><Prefix>part/</Prefix>" in folders
        assert "<Key>" not in folders
        head = urllib.request.urlopen(urllib.request.Request(f"{url}/part/a.tar", method="HEAD"))
        assert (head.headers["Content-Length"], head.read()) == ("100", b"")
        for text, expected in (("0-9", range(10)), ("90-", range(90, 100)), ("-5", range(95, 100))):
            request = urllib.request.Request(f"{url}/part/a.tar", headers={"Range": f"bytes={text}"})
            answer = urllib.request.urlopen(request)
            assert answer.status == 206
            assert answer.read() == bytes(expected)
            assert answer.headers["ETag"] == head.headers["ETag"]
        for name in ("part/b.tar", "../secret", "%2e%2e/secret", "../../etc/passwd"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/{name}")
    finally:
        thread.close()


def test_an_order_that_is_no_permutation_is_refused(
    reader_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(READERS / "order"))
    timing = reader_module("order_timing")
    monkeypatch.delitem(sys.modules, "order_timing")
    make = reader_module("wanma_order").make
    monkeypatch.delitem(sys.modules, "wanma_order")
    timing.check_order(make, 10**12)
    for wrong in (
        lambda _: lambda first, count: np.arange(first, first + count),
        lambda _: lambda first, count: np.arange(first, first + count) // 2,
        lambda _: lambda first, count: np.arange(first, first + count) + 1,
    ):
        with pytest.raises(AssertionError):
            timing.check_order(wrong, 10**12)


READER = """
import sys
print(*sys.argv[1:])
sys.exit("a sample is missing" if "--bad" in sys.argv else 0)
"""


def test_a_suite_is_not_measured_before_its_readers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SUITES.parents[1]))
    run = importlib.import_module("benchmarks.suites.run")
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "one.py").write_text(READER)
    words = ["{python}", "{suite}/readers/one.py", "--start", "5", "--cold", "--seconds", "1", "--batch", "8"]
    contenders = [
        {"name": "plain", "command": words},
        {"name": "other", "command": ["{python}", "-c", "1 / 0"]},
    ]

    def suite(*more: dict[str, Any]) -> Any:
        return make_suite("made", SuiteFile.model_validate({"contenders": [*contenders, *more]}), tmp_path)

    assert run._check_command(suite().contenders[0], suite())[2:] == ("--batch", "8", "--check")
    run.check_readers(suite())
    assert capsys.readouterr().out.startswith("plain: samples are right")
    with pytest.raises(WanmaError, match=r"'bad'[\s\S]*a sample is missing"):
        run.check_readers(suite({"name": "bad", "command": [*words, "--bad"]}))


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reader_gives_the_samples_of_the_data_and_prints_what_the_meter_reads(
    script: str, tmp_path: Path
) -> None:
    command = [sys.executable, READERS / script, tmp_path, "--small", "--batch", "16", "--workers", "1"]
    checked = _run([*command, "--check"])
    assert re.search(r"^wanma figure checked_samples [1-9]\d*$", checked, re.MULTILINE)
    printed = _run([*command, "--start", "64", "--cold"])
    assert re.search(r"^wanma step samples [1-9]\d* seconds [\d.]+$", printed, re.MULTILINE)
    figures = dict(re.findall(r"^wanma figure (\w+) ([\d.e+-]+)$", printed, re.MULTILINE))
    assert {"first_batch_seconds", "read_bytes_per_second", "memory_bytes"} <= figures.keys()
    assert 1e7 < float(figures["memory_bytes"]) < 1e10
    assert ("link_share" in figures) == script.startswith("remote")


@pytest.mark.full
def test_the_order_of_a_job_is_checked_and_timed() -> None:
    script = READERS / "order" / "wanma_order.py"
    assert "checked_samples" in _run([sys.executable, script, "1e12", "--check"])
    assert "order_batch_seconds" in _run([sys.executable, script, "1e12", "--small"])


def _run(command: list[Any]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout
