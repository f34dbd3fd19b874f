"""Hugging Face checkpoints: safetensors files as transformers writes them, read by box and written by tensor.

model.safetensors                        all tensors, or
model.safetensors.index.json             {"weight_map": {tensor: file}} and the files it names
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wanma.checkpoint.format.local_shards import DTYPES
from wanma.checkpoint.format.manifest import DTYPE_BYTES, FileRegion, build_header
from wanma.checkpoint.store.checkpoint_folder import create_output_folder
from wanma.job.errors import EXIT_USAGE, WanmaError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def has_huggingface_weights(folder: Path) -> bool:
    """Return True if `folder` holds weights in this form."""
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


class HuggingFaceWeights:
    """Tensors of a Hugging Face checkpoint, read box by box.

    Raises:
        WanmaError: there are none, or a file is missing or damaged; the message names it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _weight_map(folder)
        """File name by tensor name."""
        self.bytes_read = 0
        self.largest_read_bytes = 0
        """Bytes of the largest box read."""
        self._open: dict[str, Any] = {}

    def __enter__(self) -> HuggingFaceWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for weights_file in self._open.values():
            weights_file.__exit__(None, None, None)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return tuple(self._slice(tensor).get_shape())

    def dtype(self, tensor: str) -> str:
        """Return the tensor's dtype as the safetensors format spells it."""
        return str(self._slice(tensor).get_dtype())

    def read(self, tensor: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Read one box, on the CPU in the file's dtype; nothing else is read."""
        box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        part: Tensor = self._slice(tensor)[box]
        read_bytes = part.numel() * part.element_size()
        self.bytes_read += read_bytes
        self.largest_read_bytes = max(self.largest_read_bytes, read_bytes)
        return part

    def _slice(self, tensor: str) -> Any:
        file = self.files[tensor]
        try:
            if file not in self._open:
                weights_file = safe_open(self.folder / file, framework="pt", device="cpu")
                self._open[file] = weights_file.__enter__()
            return self._open[file].get_slice(tensor)
        except (OSError, SafetensorError) as error:
            raise WanmaError(
                f"{self.folder / file} cannot be read: {error}",
                "download the file again: it is missing or damaged",
            ) from error


def write_huggingface_weights(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    build_tensor: Callable[[str], Tensor],
    extra_files: Mapping[str, bytes],
    file_bytes: int,
) -> None:
    """Write a Hugging Face checkpoint, one tensor in memory at a time; `folder` appears when it is complete.

    Args:
        folder: the new folder.
        tensors: name -> (dtype as safetensors spells it, shape).
        build_tensor: builds one tensor of that dtype and shape.
        extra_files: contents of further files by name, such as config.json.
        file_bytes: maximum tensor bytes in one file; a larger tensor gets a file of its own.

    Raises:
        WanmaError: `folder` exists and is not empty, or cannot be written to.
    """
    with create_output_folder(folder) as partial:
        groups = _group_by_file(tensors, file_bytes)
        names = [WEIGHTS_FILE]
        if len(groups) > 1:
            names = [f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors" for n in range(len(groups))]
            index = {
                "metadata": {"total_size": sum(_tensor_bytes(*entry) for entry in tensors.values())},
                "weight_map": {
                    tensor: file for file, group in zip(names, groups, strict=True) for tensor in group
                },
            }
            _write_file(partial / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode())
        for file, group in zip(names, groups, strict=True):
            header, regions = build_header({tensor: tensors[tensor] for tensor in group})
            with (partial / file).open("wb") as stream:
                stream.write(header)
                for tensor, region in sorted(regions.items(), key=lambda entry: entry[1].start):
                    stream.write(_content(tensor, build_tensor(tensor), region))
                stream.flush()
                os.fsync(stream.fileno())
        for file, content in extra_files.items():
            _write_file(partial / file, content)


def _content(name: str, tensor: Tensor, region: FileRegion) -> memoryview:
    if (tensor.dtype, tuple(tensor.shape)) != (DTYPES[region.dtype], region.shape):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {region}")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _group_by_file(tensors: Mapping[str, tuple[str, tuple[int, ...]]], file_bytes: int) -> list[list[str]]:
    """Group tensors by file, in the given order, at most `file_bytes` per group of more than one."""
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, entry in tensors.items():
        size = _tensor_bytes(*entry)
        if groups[-1] and group_bytes + size > file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    return groups


def _tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = DTYPE_BYTES[dtype]
    for dim in shape:
        size *= dim
    return size


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _weight_map(folder: Path) -> dict[str, str]:
    if (folder / WEIGHTS_FILE).is_file():
        try:
            with safe_open(folder / WEIGHTS_FILE, framework="pt", device="cpu") as weights_file:
                return dict.fromkeys(weights_file.keys(), WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise WanmaError(
                f"{folder / WEIGHTS_FILE} cannot be read: {error}", "download the file again: it is damaged"
            ) from error
    path = folder / INDEX_FILE
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except OSError as error:
        raise WanmaError(
            f"{folder} has no safetensors weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            "give the folder that contains the .safetensors files",
            EXIT_USAGE,
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WanmaError(
            f"{path} is malformed: {type(error).__name__} {error}", "download the file again"
        ) from error
    for file in files.values():
        if Path(file).name != file or not file.endswith(".safetensors"):  # nothing outside the folder
            raise WanmaError(
                f"{path} names the file {file!r}, which is not a .safetensors file in the same folder",
                "put all .safetensors files into one folder, and name them without a path",
            )
    return files
