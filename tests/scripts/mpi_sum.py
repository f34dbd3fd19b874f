"""Sum over all ranks by MPI's C interface, as mpi4py would call it; stand-alone, for any Python."""

import ctypes
import os
import sys
import time
from pathlib import Path

mode = sys.argv[1] if len(sys.argv) > 1 else ""
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)


def handle(name: str) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, name)))


def call(name: str, *arguments: object) -> None:
    assert getattr(mpi, name)(*arguments) == 0, name


world = handle("ompi_mpi_comm_world")
rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
call("MPI_Init", None, None)
call("MPI_Comm_rank", world, ctypes.byref(rank))
call("MPI_Comm_size", world, ctypes.byref(size))
number = ctypes.c_int(rank.value + 1)
types = (handle("ompi_mpi_int"), handle("ompi_mpi_op_sum"))
call("MPI_Allreduce", ctypes.byref(number), ctypes.byref(total), 1, *types, world)
print(f"process {rank.value} of {size.value}: sum {total.value}", flush=True)
hidden = sorted(name for name in os.environ if name.startswith("WANMA_MPI"))
print(f"local rank {os.environ['OMPI_COMM_WORLD_LOCAL_RANK']}, hidden {hidden}", flush=True)
if mode == "waits":
    time.sleep(300)
if mode == "fails-once" and rank.value == 1 and not Path("failed").exists():
    Path("failed").touch()
    mode = "fails"
if mode == "fails" and rank.value == 1:
    raise ValueError("no such column: prize")
if mode == "aborts" and rank.value == 1:
    mpi.MPI_Abort(world, 0)
call("MPI_Barrier", world)
call("MPI_Finalize")
