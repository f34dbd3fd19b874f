"""Run by test_layouts.py, once per rank of four: saves on every layout, loads on every other.

Layouts on fewer ranks run on the first ranks of the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.checkpoint.load.reader import find_defects, load_full_tensors, load_tensors
from wanma.checkpoint.save.checkpointer import Checkpointer

Tensors = dict[str, torch.Tensor]
SHAPES = [(8, 6), (5, 3), (3, 4), (1, 2), (7,), (2, 3, 2), (6, 0)]
"""Even, uneven, fewer rows than ranks, one row, a vector, three dimensions, empty."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def full_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {"optimizer.step": torch.tensor(17)}
    for shape in SHAPES:
        for dtype in DTYPES:
            values = torch.randn(shape, generator=generator) * 100
            tensors[f"model.{'x'.join(map(str, shape))}.{dtype}".replace("torch.", "")] = values.to(dtype)
    return tensors


def main(rank: int, folder: Path) -> dict[str, str]:
    """Return the saves and the pairs of layouts, each with what went wrong on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    four = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("data",))
    grid = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("outer", "inner"))
    two = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("data",))
    # name -> (world size, full tensors -> this rank's tensors)
    layouts: dict[str, tuple[int, Callable[[Tensors], Tensors]]] = {
        "one process": (1, dict),
        "replicated on 2": (2, dict),
        "replicated on 4": (4, dict),
        "DTensor replicated on 4": (4, lambda full: distribute(full, four, lambda _: [Replicate()])),
        "rows on 2": (2, lambda full: distribute(full, two, lambda _: [Shard(0)])),
        "columns on 4": (4, lambda full: distribute(full, four, lambda tensor: [Shard(tensor.dim() - 1)])),
        "rows x columns": (
            4,
            lambda full: distribute(full, grid, lambda tensor: [Shard(0), Shard(tensor.dim() - 1)]),
        ),
        "FSDP2 on 2": (2, lambda full: fsdp(full, two)),
        "FSDP2 on 4": (4, lambda full: fsdp(full, four)),
        "hybrid 2 x 2": (4, lambda full: fsdp(full, grid)),
        "FSDP2 x tensor parallel": (4, lambda full: fsdp(full, grid["outer"], tensor_mesh=grid["inner"])),
    }
    full = full_tensors()
    report: dict[str, str] = {}
    for number, (name, (world_size, arrange)) in enumerate(layouts.items()):
        checkpointer = Checkpointer(folder / "saves", rank, world_size, generation=number, keep=99)
        dist.barrier()  # rank 0 has cleaned the folder
        if rank < world_size:
            checkpointer.save(number, arrange(full), {"layout": name}, rank_state={"rank": rank})
            (result,) = checkpointer.wait()
            report[f"save {name}"] = str(result.error or "")
        checkpointer.close()
        dist.barrier()
    saves = {name: folder / "saves" / f"step-{number:08d}" for number, name in enumerate(layouts)}
    if rank == 0:
        for name, path in saves.items():
            report[f"whole {name}"] = "; ".join(find_defects(path)) + difference(
                load_full_tensors(path), full
            )
    for target, (world_size, arrange) in layouts.items():
        if rank < world_size:
            expected, tensors = arrange(full), arrange(full)
            for source, path in saves.items():
                for tensor in tensors.values():
                    local_tensor(tensor.detach()).zero_()
                state, rank_state = load_tensors(path, tensors, rank=rank, world_size=world_size)
                problem = difference(tensors, expected)
                if state != {"layout": source}:
                    problem += f" state is {state}"
                same_world = layouts[source][0] == world_size
                if rank_state != ({"rank": rank} if same_world else None):
                    problem += f" rank state is {rank_state}"
                report[f"{source} -> {target}"] = problem
        dist.barrier()
    dist.destroy_process_group()
    return report


def distribute(
    full: Tensors, mesh: DeviceMesh, placements: Callable[[torch.Tensor], list[object]]
) -> Tensors:
    return {
        name: distribute_tensor(tensor, mesh, placements(tensor)) if tensor.dim() else tensor.clone()
        for name, tensor in full.items()
    }


def fsdp(full: Tensors, mesh: DeviceMesh, tensor_mesh: DeviceMesh | None = None) -> Tensors:
    """FSDP2's split of parameters; for other dtypes and dimensions, its plain row sharding."""
    tensors: Tensors = {}
    for name, tensor in full.items():
        if not tensor.is_floating_point() or tensor.dim() == 0 or tensor.numel() == 0:
            tensors[name] = tensor.clone()
            continue
        holder = nn.Module()
        value = tensor.clone()
        if tensor_mesh is not None:
            # Rows first by tensor, then by data: the interleaved case (_StridedShard).
            value = distribute_tensor(value, tensor_mesh, [Shard(0)])
        holder.value = nn.Parameter(value)
        fully_shard(holder, mesh=mesh)
        tensors[name] = holder.value
        assert isinstance(holder.value, DTensor)
    return tensors


def difference(found: Tensors, expected: Tensors) -> str:
    """Names that differ in a single bit, dtype or shape."""
    differing = [
        name for name in expected if not same_bits(local_tensor(found[name]), local_tensor(expected[name]))
    ]
    return f"differs in {differing}" if differing or set(found) != set(expected) else ""


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
