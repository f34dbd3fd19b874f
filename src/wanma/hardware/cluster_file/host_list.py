"""Expansion of host lists in Slurm's notation."""

from __future__ import annotations

import re
from collections.abc import Iterator

from wanma.hardware.cluster_file.node_builder import MAX_NODES

_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\](.*)")


def expand_host_lists(text: str) -> Iterator[str]:
    """Expand several host lists, separated by commas: 'n[1-2,7],gpu-[01-02]-ib,login'.

    Raises:
        ValueError: as `expand_host_list`.
    """
    for part in re.split(r",(?![^\[\]]*\])", text):
        yield from expand_host_list(part.strip())


def expand_host_list(text: str) -> Iterator[str]:
    """Expand a host list as Slurm writes it: 'node[01-03,7]' → node01, node02, node03, node7.

    Raises:
        ValueError: brackets without numbers, or more than `MAX_NODES` names.
    """
    match = _BRACKETS.fullmatch(text)
    if match is None:
        if not text or any(letter in text for letter in "[], "):
            raise ValueError(f"'{text}' is neither a host name nor a list such as 'node[01-08]'")
        yield text
        return
    prefix, numbers, suffix = match.groups()
    expanded_suffixes = list(expand_host_list(suffix)) if suffix else [""]
    for part in numbers.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or not 0 <= int(last) - int(first) < MAX_NODES:
            raise ValueError(f"'{text}': '{part}' is neither a number nor a range such as '01-08'")
        for number in range(int(first), int(last) + 1):
            for expanded_suffix in expanded_suffixes:
                yield f"{prefix}{number:0{len(first)}d}{expanded_suffix}"
