"""Choice of the process-group backend of a run's CPU ranks: shared memory or Gloo."""

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
    """Return the backend name that `init_process_group` is given.

    Raises:
        WanmaError: shared memory is wanted of this rank, and cannot be had.
    """
    if device.type != "cpu":
        return "cpu:gloo,cuda:nccl"
    if collectives == "gloo" or worker.world_size == 1:
        return "gloo"
    found = native_library()
    required = collectives == "shared_memory"
    if required and found.path is None:
        raise WanmaError(f"parallel.collectives = 'shared_memory' cannot be done: {found.reason}", WAY_OUT)
    # A rank without the library joins the meeting all the same, so that the others learn of it.
    return backend(Way(found.path, found.reason, required, worker.local_world_size))


def native_library() -> NativeLibrary:
    """Return the library of the shared-memory collectives, compiled from C++ where it is not there yet.

    Compiling takes about four seconds, once for this user and processor.
    """
    found = compiled(COLLECTIVES)
    if found.path is not None and not load(found.path).wanma_has_float16():
        return NativeLibrary(None, f"{cpp_compiler()} does not know 16-bit numbers (g++ 12 or later does)")
    return found


def tell_transport(worker: Worker, collectives: Collectives) -> None:
    """Print the transport of the collectives in rank 0's log.

    A message of the run says why they use Gloo where shared memory was possible in principle.
    """
    world = dist.group.WORLD
    if worker.rank != 0 or world is None or collectives == "gloo":
        return
    if shared_group(world) is not None:
        print(f"collectives of {world.size()} ranks go over shared memory", flush=True)
    elif reason := why_not(world):
        text = f"collectives go through Gloo, over TCP: {reason}"
        worker.control.event({"kind": "message", "level": "info", "text": text})
