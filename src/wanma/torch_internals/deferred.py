"""Classes of torch whose modules are imported at their first use.

The modules of DTensor and FSDP2 import the compiler and sympy, which takes nearly as long as torch itself.
Ranks that are replicas of an eager model use none of them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "DTensor",
    "FSDPModule",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "StridedShard",
]

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
