"""Samples of an MDS folder as mosaicml-streaming reads them, as JSON lines; its environment runs this.

python read_mds.py FOLDER HASH
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


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


def plain(value: Any) -> Any:
    """Return a value as JSON has it; images as the hash of their pixels, arrays with their type."""
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return ["image", value.mode, *value.size, hashlib.sha256(value.tobytes()).hexdigest()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if hasattr(value, "tolist"):
        return [str(value.dtype), value.tolist()] if getattr(value, "ndim", 0) else value.item()
    return str(value) if type(value).__name__ == "Decimal" else value


def main(folder: str, algorithm: str) -> None:
    streaming = import_streaming()
    copy = Path(folder).with_name("streaming-copy")  # it checks hashes of what it downloads
    dataset = streaming.StreamingDataset(
        remote=folder, local=str(copy), batch_size=1, validate_hash=algorithm, shuffle=False
    )
    for number in range(len(dataset)):
        print(json.dumps({name: plain(value) for name, value in dataset[number].items()}, sort_keys=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
