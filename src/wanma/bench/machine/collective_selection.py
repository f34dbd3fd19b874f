"""Selection of the collectives of a machine benchmark: sizes, collectives, algorithms."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.job.errors import JobError, did_you_mean

SIZE_STEP_FACTOR = 4
"""Ratio of neighbouring sizes of a range."""
MAX_SIZE_BYTES = 1 << 34
DIRECT = "direct"
"""Algorithm in which all ranks send to each other at once, as `collectives.fsdp` does for sharded state."""

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CollectiveSelection:
    """Collectives that are measured; what is empty is not narrowed down."""

    sizes: tuple[int, ...] = ()
    """Message sizes in bytes, rising; empty: those of a calibration."""
    collectives: tuple[str, ...] = ()
    algorithms: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls, sizes: str | None, collectives: Sequence[str], algorithms: Sequence[str]
    ) -> CollectiveSelection:
        """Return the selection of command-line options.

        Raises:
            JobError: a size is none.
        """
        return cls(parse_sizes(sizes) if sizes else (), tuple(collectives), tuple(algorithms))

    @property
    def words(self) -> tuple[str, ...]:
        """Words of a command line that give this selection."""
        options = {
            "--sizes": self.sizes,
            "--collectives": self.collectives,
            "--algorithms": self.algorithms,
        }
        return tuple(word for name, one in options.items() if one for word in (name, ",".join(map(str, one))))

    def algorithms_of(self, known: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return the pairs (collective, algorithm) of `known` that are selected.

        Raises:
            JobError: a name does not exist, or nothing is left.
        """
        known = tuple(known)
        names = tuple(dict.fromkeys(name for _, name in known))
        check_names("--collectives", self.collectives, tuple(BUS_FACTORS))
        check_names("--algorithms", self.algorithms, names)
        selected = tuple(
            (collective, name)
            for collective, name in known
            if (not self.collectives or collective in self.collectives)
            and (not self.algorithms or name in self.algorithms)
        )
        if not selected:
            available = [name for collective, name in known if collective in self.collectives]
            raise JobError(
                f"{', '.join(self.collectives)}: {', '.join(self.algorithms)} is not available",
                f"choose from {', '.join(dict.fromkeys(available))}",
            )
        return selected


ALL_COLLECTIVES = CollectiveSelection()


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse message sizes in bytes: '1K..256M' is a range, each four times the last; '4K,1M' is a list.

    Raises:
        JobError: the text has another form, or a size is out of bounds.
    """
    all_sizes: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        sizes = [_parse_size(first, text), _parse_size(last, text)] if dots else [_parse_size(first, text)]
        if sizes[0] > sizes[-1]:
            raise JobError(f"--sizes {text}: the range {part} must rise", f"write {last}..{first}")
        all_sizes.update(sizes)
        size = sizes[0]
        while (size := size * SIZE_STEP_FACTOR) < sizes[-1]:
            all_sizes.add(size)
    return tuple(sorted(all_sizes))


def _parse_size(size_text: str, text: str) -> int:
    match = _SIZE.fullmatch(size_text.strip())
    if match is None:
        raise JobError(
            f"--sizes {text}: '{size_text}' is not a size",
            "write sizes as 1K, 4M, 1G, or a range as 1K..256M",
        )
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= MAX_SIZE_BYTES:
        raise JobError(f"--sizes {text}: sizes must be 1 byte to {MAX_SIZE_BYTES >> 30}G")
    return size


def check_names(option: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise `JobError` if a name of an option is not among the known ones."""
    for name in names:
        if name not in known:
            raise JobError(
                f"{option}: unknown name '{name}'.{did_you_mean(name, known)}",
                f"choose from {', '.join(known)}",
            )
