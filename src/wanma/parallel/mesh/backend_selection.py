"""Choice of the process-group backend of a run's CPU ranks: shared memory or Gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

from wanma.collectives.shared_memory.backend import (
    GLOO_FALLBACK_HINT,
    SharedMemoryOptions,
    as_shared_memory_group,
    get_fallback_reason,
    register_backend,
)
from wanma.collectives.shared_memory.native_library import load_library
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.native_library import COLLECTIVES_SOURCE, NativeLibrary, find_or_build_library
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.parallel import CollectiveTransport


def select_backend(worker: WorkerContext, device: torch.device, collectives: CollectiveTransport) -> str:
    """Return the backend name that `init_process_group` is given.

    Raises:
        WanmaError: shared memory is wanted of this rank, and cannot be had.
    """
    if device.type != "cpu":
        return "cpu:gloo,cuda:nccl"
    if collectives == "gloo" or worker.world_size == 1:
        return "gloo"
    library = load_collectives_library()
    required = collectives == "shared_memory"
    if required and library.path is None:
        raise WanmaError(
            f"parallel.collectives = 'shared_memory' is not available: {library.failure_reason}",
            GLOO_FALLBACK_HINT,
        )
    # A rank without the library joins the meeting all the same, so that the others learn of it.
    return register_backend(
        SharedMemoryOptions(library.path, library.failure_reason, required, worker.local_world_size)
    )


def load_collectives_library() -> NativeLibrary:
    """Return the library of the shared-memory collectives: the wheel's, else compiled from C++.

    Compiling takes about four seconds, once for this user and processor.
    """
    library = find_or_build_library(COLLECTIVES_SOURCE)
    if library.path is not None and not load_library(library.path).wanma_has_float16():
        return NativeLibrary(
            None, f"{find_cpp_compiler()} does not support 16-bit floats (g++ 12 or later does)"
        )
    return library


def log_backend(worker: WorkerContext, collectives: CollectiveTransport) -> None:
    """Print the transport of the collectives in rank 0's log.

    A message of the run says why they use Gloo where shared memory was possible in principle.
    """
    world = dist.group.WORLD
    if worker.rank != 0 or world is None or collectives == "gloo":
        return
    if as_shared_memory_group(world) is not None:
        print(f"collectives of {world.size()} ranks use shared memory", flush=True)
    elif reason := get_fallback_reason(world):
        text = f"collectives use Gloo over TCP: {reason}"
        worker.supervisor_client.send_event({"kind": "message", "level": "info", "text": text})
