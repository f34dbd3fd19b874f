"""Version of the installed torch, versions that wanma was tried with, and what some of them break."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

Version = tuple[int, int]
"""Version of torch, (major, minor): (2, 13)."""

FIRST_TORCH_VERSION: Version = (2, 11)
"""First version of torch that wanma runs on."""
NEWEST_TRIED_TORCH_VERSION: Version = (2, 15)
"""Newest version of torch that the tests ran on; newer ones are used with a note."""


@cache
def installed_torch_version() -> Version:
    """Return the version of the installed torch, without importing it."""
    return parse_version(version("torch"))


def untried_version_note(torch_version: str | None = None) -> str | None:
    """Return a line about a torch that is newer than any tried, or None.

    Args:
        torch_version: complete version ("2.16.0+cpu"); default: the installed one.
    """
    text = version("torch") if torch_version is None else torch_version
    if parse_version(text) <= NEWEST_TRIED_TORCH_VERSION:
        return None
    return f"{text.partition('+')[0]}: newer than any tried here: {version_text(NEWEST_TRIED_TORCH_VERSION)}"


def parse_version(text: str) -> Version:
    """Return major and minor version of "2.13.0+cpu"."""
    match = re.match(r"(\d+)\.(\d+)", text)
    assert match is not None, "torch has a version"
    return int(match[1]), int(match[2])


def version_text(torch_version: Version) -> str:
    return f"{torch_version[0]}.{torch_version[1]}"


@dataclass(frozen=True)
class BrokenCombination:
    """Combination of settings that some versions of torch fail at, or compute wrongly."""

    problem: str
    """Predicate of a sentence about torch: "cannot compile ..."."""
    first: Version
    """First version with the problem."""
    last: Version
    """Last version with the problem."""

    def affects(self, torch_version: Version) -> bool:
        return self.first <= torch_version <= self.last

    def describe(self, torch_version: Version) -> str:
        """Return the problem as a sentence about one version."""
        return f"torch {version_text(torch_version)} {self.problem}"

    @property
    def update_hint(self) -> str:
        """Advice to install the first version without the problem."""
        return f"install torch {version_text((self.last[0], self.last[1] + 1))} or newer"


COMPILED_TENSOR_PARALLEL_RECOMPUTE = BrokenCombination(
    "cannot compile blocks with full recompute and tensor parallelism", (2, 12), (2, 13)
)
"""Compiler that puts the mesh of split parameters among the tensors that a block saves for its recompute.

It stops at that; those of 2.11 and 2.14 do not. Torch 2.12 is untested and counts as 2.13.
"""
SPLIT_BACKWARD_OF_REUSED_PARAMETERS = BrokenCombination(
    "computes wrong gradients for parameters that a forward pass uses several times", (2, 11), (2, 12)
)
"""Pipeline schedules that split a backward into input and weight gradients."""
SHARDED_INTEGER_PARAMETERS = BrokenCombination("cannot shard integer parameters", (2, 11), (2, 11))
"""FSDP2 that makes each shard a parameter with a gradient first, which only floating-point tensors can be."""
FREED_PYTHON_NODES = BrokenCombination(
    "frees nodes of autograd functions written in Python that a split backward still needs", (2, 11), (2, 12)
)
"""Pipeline schedules that split a backward. `NeighborPipelineStage` keeps the nodes.

Torch 2.12 is untested and counts as 2.11.
"""
