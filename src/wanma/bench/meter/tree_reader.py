"""Use of the processes of a measurement, read again and again at little cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wanma.observe.metrics.process_usage import (
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
    """Use of the root and its descendants."""
    root: ProcessUsage


class TreeReader:
    """Reader of the use of a process tree.

    A process that is no descendant never becomes one, so it is read once: a machine has a thousand processes,
    a measurement some.

    Args:
        root: number of the process at the root, which adopts its orphaned descendants.
    """

    def __init__(self, root: int, folder: Path = Path("/proc")) -> None:
        self._root, self._folder = root, folder
        self._others: set[int] = set()
        """Processes outside the tree."""

    def read(self) -> TreeUsage | None:
        """Return the use so far; None: the root has ended."""
        living = set(process_numbers(self._folder))
        self._others &= living  # a number may be given again
        table = read_process_table(self._folder, living - self._others)
        if self._root not in table:
            return None
        children = children_of(table)
        tree = tree_of(children, self._root)
        # A process whose parent has just ended is an orphan of the tree, perhaps: it is read again.
        for origin in children.keys() - table.keys():
            if origin == 0 or origin in self._others:
                for child in children[origin]:
                    self._others.update(tree_of(children, child))
        self._others.difference_update(tree)
        return TreeUsage(sum_usages(table[number].usage for number in tree), table[self._root].usage)
