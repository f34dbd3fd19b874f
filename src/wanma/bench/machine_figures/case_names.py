"""Names of the cases and figures of a machine benchmark, with what they are made of.

A case is `product.bf16.1024x512x512`, `copy.268435456`, `all_reduce.ring.fp32.4194304` or
`pair_stream.0-1.4194304`; its time is the figure of the same name with the suffix `_seconds`. Pure functions,
without torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from wanma.collectives.measurement.bandwidth import BUS_FACTORS

Part = Literal["compute", "memory", "framework", "links", "collectives", "storage"]
"""Part of a machine that a benchmark measures."""
PARTS: tuple[Part, ...] = get_args(Part)

SECONDS = "_seconds"
"""Suffix of the figure of a case."""

KINDS_OF_PART: dict[Part, tuple[str, ...]] = {
    "compute": ("product", "attention", "attention_backward"),
    "memory": ("stream", "copy", "host_stream", "fresh", "to_host", "from_host"),
    "framework": ("dispatch", "blocks", "blocks_tensor", "blocks_gradients", "blocks_parameters"),
    "links": ("pair_latency", "pair_stream", "bisection", "send"),
    "collectives": tuple(BUS_FACTORS),
    "storage": (
        *("disk", "file_read", "file_write", "storage_read_cold", "storage_read_cached", "storage_flush"),
        *("storage_random_read", "storage_small_files_write", "storage_small_files_read"),
    ),
}
"""Kinds of cases of each part; the kind is the first word of a case's name."""
PART_OF_KIND = {kind: part for part, kinds in KINDS_OF_PART.items() for kind in kinds}


@dataclass(frozen=True)
class CaseParts:
    """Parts of the name of a case."""

    kind: str
    algorithm: str = ""
    """Algorithm of a collective."""
    precision: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks of a pair; of a stream the source first."""
    sizes: tuple[int, ...] = ()


def case_name(kind: str, precision: str, sizes: Sequence[int]) -> str:
    """Return the name of a case that needs no other rank."""
    return ".".join(filter(None, (kind, precision, "x".join(map(str, sizes)))))


def is_case_figure(name: str) -> bool:
    """Return True if a figure is the time of a case."""
    return name.endswith(SECONDS) and parse_case(name) is not None


def parse_case(name: str) -> CaseParts | None:
    """Return the parts of the name of a case; None: it is none."""
    kind, *words = name.removesuffix(SECONDS).split(".")
    if kind not in PART_OF_KIND:
        return None
    ranks: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    names: list[str] = []
    for word in words:
        if re.fullmatch(r"\d+-\d+", word):
            ranks = tuple(map(int, word.split("-")))
        elif re.fullmatch(r"\d+(x\d+)*", word):
            sizes = tuple(map(int, word.split("x")))
        else:
            names.append(word)
    algorithm = names.pop(0) if kind in (*BUS_FACTORS, "send") and names else ""
    return CaseParts(kind, algorithm, names[0] if names else "", ranks, sizes)
