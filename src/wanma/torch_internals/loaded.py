"""State of torch in a process that may not have imported it, and classes imported at their first use.

The modules of DTensor and FSDP2 import the compiler and sympy, which takes nearly as long as torch itself.
Ranks that are replicas of an eager model use none of them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

__all__ = ["DTensor", "FSDPModule", "Partial", "Placement", "Replicate", "Shard", "StridedShard"]

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:

    class _DeferredClass(type):
        """Class that stands for one of torch's: nothing is its instance before torch's module is imported."""

        module: str
        attribute: str

        def __instancecheck__(cls, value: object) -> bool:
            known = getattr(sys.modules.get(cls.module), cls.attribute, None)
            return known is not None and isinstance(value, known)

        def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
            return cls.torch_class()(*arguments, **keywords)

        def __getattr__(cls, name: str) -> Any:
            return getattr(cls.torch_class(), name)

        def torch_class(cls) -> Any:
            return getattr(importlib.import_module(cls.module), cls.attribute)

    def _defer(module: str, attribute: str) -> _DeferredClass:
        return _DeferredClass(attribute, (), {"module": module, "attribute": attribute})

    _TENSOR = "torch.distributed.tensor"
    DTensor = _defer(_TENSOR, "DTensor")
    Placement = _defer(_TENSOR, "Placement")
    Replicate = _defer(_TENSOR, "Replicate")
    Shard = _defer(_TENSOR, "Shard")
    Partial = _defer(_TENSOR, "Partial")
    StridedShard = _defer(f"{_TENSOR}.placement_types", "_StridedShard")
    FSDPModule = _defer("torch.distributed.fsdp", "FSDPModule")

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
