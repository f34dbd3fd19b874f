"""Use of the processes of a measurement, read again and again at little cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wanma.observe.metrics.process_usage import (
    ProcessEntry,
    ProcessUsage,
    children_of,
    process_numbers,
    read_process_table,
    sum_usages,
    tree_of,
)


@dataclass(frozen=True)
class TreeUsage:
    """Use of the processes of a measurement."""

    all: ProcessUsage
    """Use of the root and its descendants, and of marked processes with theirs, ended ones included."""
    root: ProcessUsage


class TreeReader:
    """Reader of the use of a process tree, and of processes elsewhere that belong to it by a mark.

    A process that is no descendant never becomes one, so it is read once: a machine has a thousand processes,
    a measurement some. With a mark it is read twice, as it may have been about to start its program.

    Args:
        root: number of the process at the root, which adopts its orphaned descendants.
        folder: where the kernel's files of processes are.
    """

    def __init__(self, root: int, folder: Path = Path("/proc")) -> None:
        self._root, self._folder = root, folder
        self._others: set[int] = set()
        """Processes outside the tree."""
        self._mark = b""
        self._unmarked: set[int] = set()
        """Processes without the mark at their first reading."""
        self._marked: dict[int, ProcessEntry] = {}
        """Marked processes and their descendants, as they were read last."""
        self._ended_seconds = 0.0
        """CPU time of marked processes that have ended, and that no living one has in its account."""

    def add_mark(self, mark: bytes) -> None:
        """Count processes whose command line or environment contains the mark, whoever starts them."""
        self._mark = mark

    @property
    def has_marked(self) -> bool:
        """Return True if a marked process lives."""
        return bool(self._marked)

    def read(self) -> TreeUsage | None:
        """Return the use so far; None: the root has ended."""
        living = set(process_numbers(self._folder))
        self._others &= living  # a number may be given again
        table = read_process_table(self._folder, living - self._others)
        if self._root not in table:
            return None
        children = children_of(table)
        tree = tree_of(children, self._root)
        marked = self._read_marked(table, children, set(tree)) if self._mark else []
        # A process whose parent has just ended is an orphan of the tree, perhaps: it is read again.
        for origin in children.keys() - table.keys():
            if origin == 0 or origin in self._others:
                for child in children[origin]:
                    self._others.update(tree_of(children, child))
        self._others.difference_update(tree, marked, self._unmarked)
        total = sum_usages(table[number].usage for number in (*tree, *marked))
        return TreeUsage(
            ProcessUsage(total.cpu_seconds + self._ended_seconds, total.memory_bytes), table[self._root].usage
        )

    def refresh_marked(self) -> None:
        """Read the marked processes again, and their new descendants; other processes cost nothing."""
        numbers = list(self._marked)
        table: dict[int, ProcessEntry] = {}
        while numbers:
            rows = read_process_table(self._folder, numbers)
            table.update(rows)
            numbers = [child for number in rows for child in self._children(number) if child not in table]
        self._keep_marked(table)

    def _children(self, number: int) -> Iterator[int]:
        """Yield the children of a process; none where the kernel does not list them, until `read`."""
        for file in (self._folder / str(number) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from map(int, file.read_text().split())

    def _read_marked(
        self, table: dict[int, ProcessEntry], children: dict[int, list[int]], tree: set[int]
    ) -> list[int]:
        """Return the marked processes outside the tree, with their descendants."""
        seen, self._unmarked = self._unmarked, set()
        marked: dict[int, None] = {}
        for number in table:
            if number in tree or number in self._others or number in marked:
                continue
            if number in self._marked or self._has_mark(number):
                marked.update(dict.fromkeys(one for one in tree_of(children, number) if one not in tree))
            elif number not in seen:
                self._unmarked.add(number)
        self._unmarked.difference_update(marked)
        self._keep_marked({number: table[number] for number in marked})
        return list(marked)

    def _keep_marked(self, table: dict[int, ProcessEntry]) -> None:
        """Keep the living marked processes, and the time of those that have ended since they were read."""
        for number, entry in self._marked.items():
            if number in table:
                continue
            ancestor = entry.parent
            while ancestor in self._marked and ancestor not in table:
                ancestor = self._marked[ancestor].parent
            if ancestor not in table:  # one that lives has the time of its ended descendants in its account
                self._ended_seconds += entry.usage.cpu_seconds
        self._marked = table

    def _has_mark(self, number: int) -> bool:
        """Return True if a process has the mark; one of another user cannot be read, and has none."""
        for name in ("cmdline", "environ"):
            try:
                if self._mark in (self._folder / str(number) / name).read_bytes():
                    return True
            except OSError:
                continue
        return False
