"""What `wanma bench collectives` is asked to measure: sizes, collectives, algorithms, precisions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wanma.collectives.measurement.bandwidth import BUS_FACTORS
from wanma.job.errors import JobError, did_you_mean

DTYPES = ("fp32", "bf16", "fp16", "fp64")
SIZES = "1K..256M"
FACTOR = 4
"""From one size to the next of a range."""
MOST_BYTES = 1 << 34
DIRECT = "direct"
"""Every rank with every other at once, as `collectives.gloo` sends sharded parameters and gradients."""

_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Asked:
    """What is measured for each number of ranks."""

    sizes: tuple[int, ...]
    """Bytes, rising."""
    algorithms: tuple[tuple[str, str], ...]
    """(collective, algorithm), in the order in which they are shown."""
    dtypes: tuple[str, ...]


def sizes_of(text: str) -> tuple[int, ...]:
    """'1K..256M': from one to the other, times four each; '4K,1M': these.

    Raises:
        JobError: it is something else, or a size is out of bounds.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        sizes = [_size(first, text), _size(last, text)] if dots else [_size(first, text)]
        if sizes[0] > sizes[-1]:
            raise JobError(f"--sizes {text}: {part} falls", f"write the smaller one first: {last}..{first}")
        found.update(sizes)
        size = sizes[0]
        while (size := size * FACTOR) < sizes[-1]:
            found.add(size)
    return tuple(sorted(found))


def _size(word: str, text: str) -> int:
    match = _SIZE.fullmatch(word.strip())
    if match is None:
        raise JobError(
            f"--sizes {text}: '{word}' is no size", "write sizes as 1K, 4M, 1G, or a range as 1K..256M"
        )
    size = int(match[1]) * _UNITS[match[2].upper()]
    if not 1 <= size <= MOST_BYTES:
        raise JobError(f"--sizes {text}: a size is from 1 byte to {MOST_BYTES >> 30}G")
    return size


def algorithms_of(
    collectives: Sequence[str], algorithms: Sequence[str], known: Iterable[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    """Those of `known` that are asked for; an empty sequence asks for all.

    Raises:
        JobError: a name that does not exist, or nothing is left.
    """
    known = tuple(known)
    names = tuple(dict.fromkeys(name for _, name in known))
    _check("--collectives", collectives, tuple(BUS_FACTORS))
    _check("--algorithms", algorithms, names)
    asked = tuple(
        (collective, name)
        for collective, name in known
        if (not collectives or collective in collectives) and (not algorithms or name in algorithms)
    )
    if not asked:
        has = [name for collective, name in known if collective in collectives]
        raise JobError(
            f"{', '.join(collectives)}: by {', '.join(algorithms)} there is none",
            f"algorithms: {', '.join(dict.fromkeys(has))}",
        )
    return asked


def dtypes_of(names: Sequence[str]) -> tuple[str, ...]:
    """Raises `JobError` for a precision that there is not."""
    _check("--dtypes", names, DTYPES)
    return tuple(dict.fromkeys(names)) or DTYPES[:1]


def _check(option: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise JobError(
                f"{option}: there is no '{name}'.{did_you_mean(name, known)}",
                f"there are: {', '.join(known)}",
            )
