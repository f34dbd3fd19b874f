"""`wanma data prepare --nodes`: nodes with a common cache share the work, and any of them may be killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data_files import add_member
from support.labelled_images import picture
from wanma.cli.main import main
from wanma.data.stores.node_meeting import meet_nodes
from wanma.job.errors import WanmaError

NODE = """
import sys, threading, time
from pathlib import Path
from wanma.cli.main import main
from wanma.data import shared_preparation
from wanma.data.formats.tar_samples import TarSamples
from wanma.data.text import encoding_task, tokenization
folder, hang_at, *arguments = sys.argv[1:]
node = arguments[arguments.index("--node") + 1]
encoding_task.TASK_BYTES = 100
shared_preparation.WAIT_SECONDS = 120.0
count, lock = 0, threading.Lock()
def counted(function):
    def call(*given):
        global count
        with lock:
            count += 1
            number = count
            print("part", number, flush=True)
        if number == int(hang_at):
            time.sleep(600)
        if hang_at != "-1":  # no node does its first part before the other has begun one
            Path(folder, f"begun-{node}").touch()
            while len(list(Path(folder).glob("begun-*"))) < 2:
                time.sleep(0.01)
        return function(*given)
    return call
tokenization.run_task = counted(tokenization.run_task)
TarSamples.scan = counted(TarSamples.scan)
code = main(["data", "prepare", *arguments])
print("done", code, count, flush=True)
"""
TASKS = 30
JOB = """\
[model]
preset = "gpt-1m"
[data]
text = ["{folder}/corpus"]
sequence_length = 8
cache = "{folder}/cache"
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job of 30 tasks, and its token file made by one process in `alone`."""
    from wanma.data.text import encoding_task

    monkeypatch.setattr(encoding_task, "TASK_BYTES", 100)
    (tmp_path / "corpus").mkdir()
    for number in range(TASKS):
        (tmp_path / "corpus" / f"{number:02}.txt").write_text(f"document {number}\n" * 8)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    assert main(["data", "prepare", f"{tmp_path}/job.toml", f"data.cache={tmp_path}/alone"]) == 0
    return tmp_path


@contextlib.contextmanager
def started(
    folder: Path, node: int, *more: str, hang_at: int = 0, nodes: int = 2
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", NODE, str(folder), str(hang_at), f"{folder}/job.toml", *more]
    command += ["--nodes", str(nodes), "--node", str(node)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_part(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) != f"part {number}\n":
        assert line, "the node has ended"


def result(process: subprocess.Popen[str]) -> tuple[int, int, str]:
    """Exit code of a node, the parts that it has done, and all that it has printed."""
    out, err = process.communicate(timeout=120)
    _, code, count = out.splitlines()[-1].split()
    return int(code), int(count), out + err


def token_files(cache: Path) -> dict[str, bytes]:
    (folder,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["digests.bin", "header.json", "offsets.bin", "tokens.bin", "verified.json"]
    return {name: (folder / name).read_bytes() for name in names if name != "verified.json"}


def check_equal(folder: Path) -> None:
    assert token_files(folder / "cache") == token_files(folder / "alone")


def test_two_nodes_share_the_parts_and_the_result_is_that_of_one_process(corpus: Path) -> None:
    with started(corpus, 0) as first, started(corpus, 1) as second:
        results = [result(first), result(second)]
    assert [code for code, _, _ in results] == [0, 0], results
    counts = [count for _, count, _ in results]
    assert sum(counts) == TASKS, "no part is done twice"
    assert min(counts) >= 1
    assert "on 2 nodes (this is node 0)" in results[0][2]
    check_equal(corpus)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_node_does_the_parts_of_a_killed_one_which_may_come_again(
    corpus: Path, victim: int
) -> None:
    hang_at = [3 if node == victim else 0 for node in range(2)]
    with started(corpus, 0, hang_at=hang_at[0]) as first, started(corpus, 1, hang_at=hang_at[1]) as second:
        nodes = first, second
        wait_for_part(nodes[victim], 3)
        nodes[victim].send_signal(signal.SIGKILL)
        nodes[victim].wait()
        code, count, text = result(nodes[1 - victim])
    assert code == 0, text
    assert count >= TASKS - 2, "the killed node has done two parts"
    check_equal(corpus)
    with started(corpus, victim, hang_at=-1) as again:
        assert result(again)[:2] == (0, 0), "nothing is left to do, and it waits for nobody"
    check_equal(corpus)


def test_when_all_nodes_were_killed_they_go_on_where_they_were(corpus: Path) -> None:
    with started(corpus, 0, hang_at=6) as first, started(corpus, 1, hang_at=6) as second:
        for process in (first, second):
            wait_for_part(process, 6)
        for process in (first, second):
            process.send_signal(signal.SIGKILL)
            process.wait()
    with started(corpus, 0) as first, started(corpus, 1) as second:
        results = [result(first), result(second)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert sum(count for _, count, _ in results) < TASKS
    check_equal(corpus)


def test_nodes_that_share_no_cache_are_refused_with_the_way_out(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from wanma.data import shared_preparation

    monkeypatch.setattr(shared_preparation, "WAIT_SECONDS", 0.5)
    arguments = [f"{corpus}/job.toml", f"data.cache={corpus}/own", "--nodes", "2", "--node"]
    assert main(["data", "prepare", *arguments, "0"]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "waited 0 s for node 1" in text or "waited 1 s for node 1" in text
    assert "the nodes do not share this folder" in text
    assert "leave out --nodes" in text
    assert not (corpus / "own" / "tokens").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "2"], "the number of this node is unknown"),
        (["--nodes", "2", "--node", "2"], "--node 2 of 2 nodes"),
        (["--node", "1"], "--node 1 of 1 node"),
    ],
)
def test_wrong_numbers_of_nodes_are_refused(
    corpus: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "prepare", f"{corpus}/job.toml", *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_two_processes_cannot_be_one_node(tmp_path: Path) -> None:
    with (
        meet_nodes(tmp_path, 1, 0, 0.0),
        pytest.raises(WanmaError, match="another process prepares the same data as node 0"),
        meet_nodes(tmp_path, 1, 0, 0.0),
    ):
        pass


IMAGE_JOB = """\
[model]
preset = "gpt-1m"
[data]
images = ["{folder}/images"]
cache = "{folder}/cache"
"""


def test_two_nodes_scan_the_files_of_an_index_together(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for shard in range(12):
        with tarfile.open(tmp_path / "images" / f"{shard:02}.tar", "w") as archive:
            for number in range(3):
                add_member(archive, f"{number}.png", picture(shard))
                add_member(archive, f"{number}.cls", str(shard).encode())
    (tmp_path / "job.toml").write_text(IMAGE_JOB.format(folder=tmp_path))
    assert main(["data", "prepare", f"{tmp_path}/job.toml", f"data.cache={tmp_path}/alone"]) == 0
    with started(tmp_path, 0) as first, started(tmp_path, 1) as second:
        results = [result(first), result(second)]
    assert [code for code, _, _ in results] == [0, 0], results
    assert sum(count for _, count, _ in results) == 12, "no file is scanned twice"
    assert index_files(tmp_path / "cache") == index_files(tmp_path / "alone")


def index_files(cache: Path) -> dict[str, bytes]:
    files = [path for path in (cache / "index").rglob("*") if path.is_file()]
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}


def test_ranks_of_a_launcher_are_the_nodes(corpus: Path) -> None:
    command = [sys.executable, "-m", "wanma", "launch", "--ranks", "2", "--run-dir", str(corpus / "run")]
    command += ["-m", "wanma", "data", "prepare", f"{corpus}/job.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for node in (0, 1):
        assert f"on 2 nodes (this is node {node})" in done.stdout + done.stderr
    names = {path.name for path in (corpus / "cache" / "preparation").glob("*/*")}
    assert names == {"node-0", "node-1", "done"}
