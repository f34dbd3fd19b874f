"""Use of processors, memory and network, from the kernel's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from wanma.observe.metrics.process_usage import (
    ProcessEntry,
    ProcessUsage,
    parse_stat,
    read_network_bytes,
    read_process_table,
    sum_trees,
)


def test_a_tree_is_summed_with_all_descendants() -> None:
    def entry(parent: int, seconds: float, size: int) -> ProcessEntry:
        return ProcessEntry(parent, ProcessUsage(seconds, size))

    table = {10: entry(1, 1.0, 100), 11: entry(10, 2.0, 10), 12: entry(11, 4.0, 1), 20: entry(1, 8.0, 1000)}
    assert sum_trees(table, [10, 20, 30]) == {10: ProcessUsage(7.0, 111), 20: ProcessUsage(8.0, 1000)}


def test_a_name_with_spaces_and_parentheses_is_no_field() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    fields = ["S", "7", *["0"] * 9, str(2 * ticks), str(ticks), str(ticks), "0", *["0"] * 6, "3", "0"]
    entry = parse_stat(f"12 (a) b (c) {' '.join(fields)}")
    assert entry == ProcessEntry(7, ProcessUsage(4.0, 3 * os.sysconf("SC_PAGE_SIZE")))


def test_a_living_process_has_its_children_in_the_table() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        table = read_process_table()
        assert table[child.pid].parent == os.getpid()
        own = sum_trees(table, [os.getpid()])[os.getpid()]
        assert own.memory_bytes >= table[os.getpid()].usage.memory_bytes + table[child.pid].usage.memory_bytes
        assert child.stdin is not None
        child.stdin.close()
        child.kill()


def test_bytes_of_an_interface(tmp_path: Path) -> None:
    folder = tmp_path / "eth0" / "statistics"
    folder.mkdir(parents=True)
    (folder / "rx_bytes").write_text("12\n")
    (folder / "tx_bytes").write_text("34\n")
    assert read_network_bytes("eth0", tmp_path) == (12, 34)
    assert read_network_bytes("eth1", tmp_path) is None
    assert read_network_bytes(None) is None
