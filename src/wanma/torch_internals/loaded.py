"""State of torch in a process that may not have imported it; nothing here imports it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

COMPILER_MODULE = "torch._dynamo"
"""Module of the compiler; FSDP2 imports it at its first use."""


def is_compiler_loaded() -> bool:
    return COMPILER_MODULE in sys.modules


def is_dtensor_loaded() -> bool:
    return "torch.distributed.tensor" in sys.modules


def is_compiled_wrapper(module: object) -> bool:
    """Return whether a module is the result of `torch.compile(module)`, which renames its parameters."""
    compiler: Any = sys.modules.get(COMPILER_MODULE)
    return isinstance(module, getattr(compiler, "OptimizedModule", ()))


def is_profiler_on() -> bool:
    """Return whether a profiler of torch, of which a process can have one, is on."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and profiler._is_profiler_enabled


def process_groups() -> list[Any]:
    """Return the process groups of this process."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if distributed is None else list(distributed._world.pg_map)


def flight_recorder_dumps() -> Iterator[bytes]:
    """Yield the JSON of torch's flight recorders: the one of all backends, and NCCL's."""
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(native, name, None)) is not None:
            yield dump() or b"{}"
