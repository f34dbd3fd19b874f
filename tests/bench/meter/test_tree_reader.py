"""Use of a process tree that is read again and again, in made files of the kernel."""

from __future__ import annotations

import os
import shutil
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


def mark(processes: Processes, number: int, file: str = "environ") -> None:
    (processes.folder / str(number) / file).write_bytes(b"A=1\0RUN=/x/bench-0123\0")


def test_marked_processes_of_another_tree_count_with_their_descendants(
    processes: Processes, tmp_path: Path
) -> None:
    reader = TreeReader(10, tmp_path)
    assert cpu_seconds(reader) == 3.0
    reader.add_mark(b"bench-0123")
    processes.set(20, 2, seconds=0.5)  # a scheduler starts it, and its program names the run
    mark(processes, 20, "cmdline")
    processes.set(21, 20, seconds=0.25)
    processes.set(22, 2, seconds=9.0)
    assert cpu_seconds(reader) == 3.75
    assert reader.has_marked
    # Before its program starts, a process has the environment of the one that starts it.
    processes.set(23, 2, seconds=0.0)
    assert cpu_seconds(reader) == 3.75
    processes.set(23, 2, seconds=2.0)
    mark(processes, 23)
    assert cpu_seconds(reader) == 5.75
    processes.reads.clear()
    cpu_seconds(reader)
    assert sorted(processes.reads) == [10, 11, 12, 20, 21, 23], "22 is read no more"


def test_the_time_of_a_marked_process_stays_when_it_ends(processes: Processes, tmp_path: Path) -> None:
    reader = TreeReader(10, tmp_path)
    reader.add_mark(b"bench-0123")
    for number, parent in ((20, 2), (21, 20), (22, 21)):
        processes.set(number, parent, seconds=1.0)
        mark(processes, number)
    assert cpu_seconds(reader) == 6.0
    processes.end(22)
    processes.set(21, 20, seconds=2.0)  # the parent has it in its account
    assert cpu_seconds(reader) == 6.0
    for number in (20, 21):
        processes.end(number)
    assert cpu_seconds(reader) == 6.0
    assert not reader.has_marked


def list_children(processes: Processes, number: int, *children: int) -> None:
    folder = processes.folder / str(number) / "task" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "children").write_text("".join(f"{child} " for child in children))


def test_marked_processes_are_read_again_without_the_others(processes: Processes, tmp_path: Path) -> None:
    reader = TreeReader(10, tmp_path)
    reader.add_mark(b"bench-0123")
    processes.set(20, 2, seconds=1.0)
    mark(processes, 20)
    assert cpu_seconds(reader) == 4.0
    processes.set(21, 20, seconds=0.5)
    processes.set(22, 21, seconds=0.25)
    list_children(processes, 20, 21)
    list_children(processes, 21, 22)
    processes.set(30, 2, seconds=9.0)
    processes.reads.clear()
    reader.refresh_marked()
    assert processes.reads == [20, 21, 22]
    shutil.rmtree(tmp_path / "21")
    processes.end(22)
    processes.set(20, 2, seconds=1.75)
    list_children(processes, 20)
    reader.refresh_marked()
    assert cpu_seconds(reader) == 4.75
    shutil.rmtree(tmp_path / "20")
    assert cpu_seconds(reader) == 4.75
    assert not reader.has_marked


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
