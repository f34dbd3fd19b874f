"""Use of a process tree that is read again and again, in made files of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wanma.bench.meter.tree_reader import TreeReader
from wanma.observe.metrics import process_usage

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Processes:
    """Made /proc; counts how often each process is read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.reads = folder, list[int]()
        read = process_usage._read

        def counting(path: str) -> str:
            self.reads.append(int(path.split("/")[-2]))
            return read(path)

        monkeypatch.setattr(process_usage, "_read", counting)

    def set(self, number: int, parent: int, seconds: float = 0.0, pages: int = 1) -> None:
        (self.folder / str(number)).mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(round(seconds * TICKS)), *["0"] * 9, str(pages)]
        (self.folder / str(number) / "stat").write_text(f"{number} (a (name) {number}) {' '.join(fields)}\n")

    def end(self, number: int) -> None:
        for path in (self.folder / str(number)).iterdir():
            path.unlink()
        (self.folder / str(number)).rmdir()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes(tmp_path, monkeypatch)
    for number, parent in ((1, 0), (2, 0), (3, 2), (5, 1), (10, 5), (11, 10), (12, 11), (6, 5)):
        made.set(number, parent, seconds=1.0)
    return made


def cpu_seconds(reader: TreeReader) -> float:
    usage = reader.read()
    assert usage is not None
    return usage.all.cpu_seconds


def test_others_are_read_once_and_the_tree_each_time(processes: Processes, tmp_path: Path) -> None:
    reader = TreeReader(10, tmp_path)
    usage = reader.read()
    assert usage is not None
    assert (usage.all.cpu_seconds, usage.all.memory_bytes, usage.root.memory_bytes) == (3.0, 3 * PAGE, PAGE)
    assert sorted(processes.reads) == [1, 2, 3, 5, 6, 10, 11, 12]
    processes.reads.clear()
    processes.set(12, 11, seconds=4.0)
    processes.set(13, 12, seconds=0.5)
    processes.set(14, 3, seconds=9.0)
    assert cpu_seconds(reader) == 6.5
    assert sorted(processes.reads) == [10, 11, 12, 13, 14]
    processes.reads.clear()
    assert cpu_seconds(reader) == 6.5
    assert sorted(processes.reads) == [10, 11, 12, 13]


def test_a_descendant_whose_parent_ends_is_lost_for_a_moment_only(
    processes: Processes, tmp_path: Path
) -> None:
    reader = TreeReader(10, tmp_path)
    assert cpu_seconds(reader) == 3.0
    processes.end(11)
    assert cpu_seconds(reader) == 1.0  # 12 still names the parent that has ended
    processes.set(12, 10, seconds=2.0)  # adopted by the root
    assert cpu_seconds(reader) == 3.0


def test_a_number_that_is_given_again_is_read_again(processes: Processes, tmp_path: Path) -> None:
    reader = TreeReader(10, tmp_path)
    reader.read()
    processes.end(6)
    reader.read()
    processes.set(6, 12, seconds=7.0)
    assert cpu_seconds(reader) == 10.0


def test_a_root_that_has_ended_has_no_use(processes: Processes, tmp_path: Path) -> None:
    reader = TreeReader(10, tmp_path)
    processes.end(10)
    assert reader.read() is None


def test_real_processes_are_counted() -> None:
    reader = TreeReader(os.getpid())
    before = reader.read()
    spin = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        after = reader.read()
        process.kill()
    assert before is not None
    assert after is not None
    assert after.all.cpu_seconds - before.all.cpu_seconds >= 0.35
