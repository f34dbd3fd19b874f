"""What the collectives of a run go over, on CPUs: memory that ranks share, or Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from wanma.collectives.shared_memory.backend import WAY_OUT, Way, backend, shared_group, why_not
from wanma.collectives.shared_memory.native_library import load
from wanma.hardware.native.cpp_compiler import cpp_compiler
from wanma.hardware.native.native_library import COLLECTIVES, NativeLibrary, compiled
from wanma.job.errors import WanmaError
from wanma.job.run.worker import Worker
from wanma.job.sections.parallel import Collectives


def backend_name(worker: Worker, device: torch.device, collectives: Collectives) -> str:
    """What `init_process_group` is to be given.

    Raises:
        WanmaError: shared memory is wanted of this rank, and cannot be had.
    """
    if device.type != "cpu":
        return "cpu:gloo,cuda:nccl"
    if collectives == "gloo" or worker.world_size == 1:
        return "gloo"
    found = native_library()
    required = collectives == "shared"
    if required and found.path is None:
        raise WanmaError(f"parallel.collectives = 'shared' cannot be done: {found.reason}", WAY_OUT)
    # Where this rank cannot, the others have to hear of it: it takes part in their meeting all the same.
    return backend(Way(found.path, found.reason, required, worker.local_world_size))


def native_library() -> NativeLibrary:
    """The collectives' C++. Compiled where it is not there yet: about four seconds, once for this user and
    processor."""
    found = compiled(COLLECTIVES)
    if found.path is not None and not load(found.path).wanma_has_float16():
        return NativeLibrary(None, f"{cpp_compiler()} does not know 16-bit numbers (g++ 12 or later does)")
    return found


def tell_transport(worker: Worker, collectives: Collectives) -> None:
    """Say it once, in rank 0's log; as a message of the run where it is not what could be."""
    world = dist.group.WORLD
    if worker.rank != 0 or world is None or collectives == "gloo":
        return
    if shared_group(world) is not None:
        print(f"collectives of {world.size()} ranks go over shared memory", flush=True)
    elif reason := why_not(world):
        text = f"collectives go through Gloo, over TCP: {reason}"
        worker.control.event({"kind": "message", "level": "info", "text": text})
