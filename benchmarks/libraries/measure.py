"""One round on one node: collectives and the int8 codec of several compiled libraries, in turns.

    python -m benchmarks.libraries.measure --packages native=FOLDER x86-64-v3=FOLDER --output FILE

FOLDER has group.so and blockwise.so. Writes JSON: for each case the seconds with each library, of the slowest
of two ranks. Collectives are calls of `torch.distributed`, by one thread of each rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.collectives.measure import collective_run, in_turns
from wanma.collectives.compression.int8_codec import BlockwiseInt8Codec
from wanma.collectives.shared_memory.backend import (
    SharedMemoryOptions,
    as_shared_memory_group,
    register_backend,
)

RANKS = 2
MEBIBYTES = (0.0625, 1.0, 16.0)
IN_PLACE = " in place"
CASES = (
    ("all_reduce", "float32"),
    ("all_reduce", "bfloat16"),
    ("all_reduce", "float16"),
    (f"all_reduce{IN_PLACE}", "float32"),
    ("reduce_scatter", "float32"),
    ("all_gather", "float32"),
    ("int8 encode", "float32"),
    ("int8 decode", "float32"),
)
"""Operations with their types of elements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", nargs="+", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    packages = dict(package.split("=", 1) for package in options.packages)
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        spawn(measure, (packages, folder, str(options.output)), nprocs=RANKS)


def measure(rank: int, packages: dict[str, str], folder: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    gloo = dist.group.WORLD
    assert gloo is not None
    groups = {name: _open_group(Path(package) / "group.so") for name, package in packages.items()}
    codecs = {name: BlockwiseInt8Codec(Path(package) / "blockwise.so") for name, package in packages.items()}
    seconds = {}
    for operation, dtype in CASES:
        for size in MEBIBYTES:
            elements = int(size * 2**20) // getattr(torch, dtype).itemsize
            if operation.startswith("int8"):
                runs = {name: _codec_run(operation, elements, codec) for name, codec in codecs.items()}
            else:
                collective, in_place = operation.removesuffix(IN_PLACE), operation.endswith(IN_PLACE)
                runs = {
                    name: collective_run(
                        collective, elements, group, in_place=in_place, dtype=getattr(torch, dtype)
                    )
                    for name, group in groups.items()
                }
            seconds[f"{operation}|{dtype}|{size:g}"] = in_turns(runs, gloo)
    if rank == 0:
        Path(output).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def _open_group(library: Path) -> dist.ProcessGroup:
    options = SharedMemoryOptions(library, is_required=True, local_world_size=RANKS)
    group: dist.ProcessGroup = dist.new_group(backend=register_backend(options))
    assert as_shared_memory_group(group) is not None
    return group


def _codec_run(operation: str, elements: int, codec: BlockwiseInt8Codec) -> Callable[[], object]:
    values = torch.randn(1, elements, generator=torch.Generator().manual_seed(0))
    encoded = codec.encode(values)
    return partial(codec.encode, values) if operation == "int8 encode" else partial(codec.decode, encoded)


if __name__ == "__main__":
    main()
