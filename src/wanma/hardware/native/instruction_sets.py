"""Instruction sets for which a wheel carries compiled libraries, and their choice for this processor.

`setup.py` runs this file by itself when it builds the wheel: it imports the standard library only.
"""

from __future__ import annotations

import platform
from pathlib import Path

COMPILER_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
"""Compiler flags; without contraction to fused multiply-add, results do not depend on the processor; without
the error number of a root, loops of them become vector code."""
CARRIED_LINKER_FLAGS = ("-s", "-lgcc")
"""Linker flags of carried libraries: fp16 is converted by libgcc.a, because old copies of libgcc_s cannot."""
CARRIED_SOURCES = (
    "collectives/shared_memory/native/group.cpp",
    "collectives/compression/native/blockwise.cpp",
    "parallel/embedding/native/rows.cpp",
)
"""Sources of the carried libraries, in the folder of the package."""

_V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
CARRIED_LEVELS = {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2}
"""Flags of /proc/cpuinfo that a level requires, by the level's name for -march=, best first.

The levels are those of the x86-64 psABI, section 3.1.1. The first level is left out: it lacks the instruction
for rounding (SSE4.1), and processors since 2009 have the second.
"""


def carried_library(source: Path, level: str) -> Path:
    """Return the path of the library that a wheel carries for `source`, in the level's folder beside it."""
    return source.parent / level / f"{source.stem}.so"


def find_carried_library(source: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path | None:
    """Return the carried library of `source` for the best level of this processor; None: none is carried."""
    supported = supported_levels(cpuinfo)
    return next((path for level in supported if (path := carried_library(source, level)).exists()), None)


def supported_levels(cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = "") -> list[str]:
    """Return the carried levels that this processor and its operating system can run, best first."""
    if (machine or platform.machine()) != "x86_64":
        return []
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    # All processors of a node may run a rank: a flag counts if all have it.
    flags = [set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")]
    common = set.intersection(*flags) if flags else set()
    return [level for level, required in CARRIED_LEVELS.items() if required <= common]
