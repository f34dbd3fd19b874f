"""Mosaic Streaming, imported where torchvision is missing."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@cache
def import_streaming() -> Any:
    """Import the library. Its images need torchvision, whose builds on PyPI do not fit PyTorch for CPUs."""
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            module: Any = ModuleType(f"torchvision{name}")
            module.__spec__ = ModuleSpec(module.__name__, None)
            module.VisionDataset = module.to_tensor = object
            sys.modules[module.__name__] = module
    import streaming

    return streaming
