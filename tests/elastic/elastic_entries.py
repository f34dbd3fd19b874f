"""Entry functions that tests run in real ranks. What one needs beyond `worker` comes in `payload`."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from wanma.job.errors import WanmaError


def finish(worker: Any, payload: bytes) -> None:
    print(f"payload {payload.decode()!r}")
    for step in range(3):
        worker.supervisor_client.report_progress(step, "forward")
        if worker.rank == 0:
            worker.supervisor_client.send_event({"kind": "step", "step": step, "loss": 1.5 - step})


def describe(worker: Any, payload: bytes) -> None:
    """Record of this process, as a file for the test."""
    import torch

    about = {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "world_size": worker.world_size,
        "node_rank": worker.node_rank,
        "generation": worker.generation,
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "arguments": Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0"),
        "session": os.getsid(0),
        "pid": os.getpid(),
        "name": Path("/proc/self/comm").read_text().strip(),
        "ignores_interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "store": type(worker.store).__name__,
        "sockets": [
            str(link.readlink())
            for link in Path("/proc/self/fd").iterdir()
            if link.is_symlink() and str(link.readlink()).startswith("socket:")
        ],
    }
    Path(payload.decode(), f"about-{worker.rank}.json").write_text(json.dumps(about))


def last_words(worker: Any, payload: bytes) -> None:
    """Leaves behind everything that an interpreter attends to at its end."""
    from concurrent.futures import ThreadPoolExecutor

    atexit.register(lambda: print("from atexit"))
    ThreadPoolExecutor(1).submit(print, "from an executor")
    threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()
    sys.stdout.write("without a newline")


def raise_on_rank_1(worker: Any, payload: bytes) -> None:
    worker.supervisor_client.report_progress(1, "forward")
    if worker.rank == 1:
        raise ValueError("no such column: prize")
    wait_forever()


def refuse_everywhere(worker: Any, payload: bytes) -> None:
    raise WanmaError(f"rank {worker.rank}: the corpus is empty", "give data.text some files", exit_code=2)


def echo_before_cause(worker: Any, payload: bytes) -> None:
    """Rank 0 notices the death of rank 1 before rank 1's own word arrives."""
    if worker.rank == 0:
        raise ConnectionResetError("Connection reset by peer")
    time.sleep(0.3)
    raise ValueError("the cause")


def kill_last_rank(worker: Any, payload: bytes) -> None:
    if worker.rank == worker.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_forever()


def leave_early(worker: Any, payload: bytes) -> None:
    os._exit(0)


def exit_with_3(worker: Any, payload: bytes) -> None:
    raise SystemExit(3)


def until_stopped(worker: Any, payload: bytes) -> None:
    """Steps until asked to stop; rank 0 says when it has begun."""
    step = 0
    while not worker.supervisor_client.is_drain_requested():
        worker.supervisor_client.report_progress(step, "forward")
        if step == 0 and worker.rank == 0:
            worker.supervisor_client.send_event({"kind": "start"})
        step += 1
        time.sleep(0.01)
    print("stopped in order")


def stubborn(worker: Any, payload: bytes) -> None:
    """Never stops by itself, ignores SIGTERM, and has a child."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    if payload:
        Path(payload.decode(), f"pids-{worker.rank}").write_text(f"{os.getpid()} {child.pid}")
    worker.supervisor_client.send_event({"kind": "start", "rank": worker.rank})
    worker.supervisor_client.report_progress(0, "forward")
    wait_forever()


def rank_1_hangs_in_data_loading(worker: Any, payload: bytes) -> None:
    import torch
    import torch.distributed as dist

    store = worker.store
    if store is None:
        store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    for step in range(3):
        worker.supervisor_client.report_progress(step, "data loading")
        if step == 2 and worker.rank == 1:
            wait_forever()
        worker.supervisor_client.report_progress(step, "gradient exchange")
        dist.all_reduce(torch.ones(4))


def rank_1_is_stopped(worker: Any, payload: bytes) -> None:
    worker.supervisor_client.report_progress(0, "forward")
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_forever()


def all_reduce(worker: Any, payload: bytes) -> None:
    import torch
    import torch.distributed as dist

    store = worker.store
    if store is None:
        store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    total = torch.tensor([float(worker.rank + 1)])
    dist.all_reduce(total)
    print(f"sum {total.item():g} on node {worker.node_rank}")
    print(f"over {os.environ['GLOO_SOCKET_IFNAME']}")
    if worker.rank == 0:
        worker.supervisor_client.send_event({"kind": "sum", "sum": total.item()})
    dist.destroy_process_group()


def steps_together(worker: Any, payload: bytes) -> None:
    """Eight steps in which the ranks wait for each other; copies of the state are left and taken up.

    Args:
        payload: folder in which the ranks meet.
    """
    folder = Path(payload.decode())
    step = worker.memory_files.restore_step or 0
    if worker.restart is not None and worker.rank == 0:
        restored = sorted(worker.memory_files.restore_paths)
        worker.supervisor_client.send_event(
            {"kind": "restart", "step": step, "ranks": restored, **vars(worker.restart)}
        )
    while step < 8 and not meet(
        worker, folder, f"stop {step}", str(worker.supervisor_client.is_drain_requested())
    ):
        step += 1
        worker.supervisor_client.report_progress(step, "forward")
        meet(worker, folder, f"forward {step}")
        worker.supervisor_client.report_finished_step(step)
        leave_image(worker, step)
        if worker.rank == 0:
            worker.supervisor_client.send_event(
                {"kind": "step", "step": step, "generation": worker.generation}
            )
        meet(worker, folder, f"end {step}")
    print(f"left after step {step}")


def meet(worker: Any, folder: Path, where: str, says: str = "") -> bool:
    """Wait until all ranks are there; returns whether one of them says 'True'."""
    (folder / f"{worker.generation} {where} {worker.rank} {says}").touch()
    while len(there := list(folder.glob(f"{worker.generation} {where} *"))) < worker.world_size:
        time.sleep(0.002)
    return any(path.name.endswith(" True") for path in there)


def leave_image(worker: Any, step: int) -> None:
    import xxhash

    from wanma.checkpoint.in_memory.memory_file import MemoryFileHeader, MemoryFileWriter

    image = MemoryFileWriter(worker.memory_files.own_paths[step % 2])
    content = image.content(8)
    image.mark_incomplete(MemoryFileHeader(step, worker.generation, worker.rank, worker.world_size))
    content[:] = step.to_bytes(8, "little")
    image.finish(8, xxhash.xxh3_128(content), b"{}")
    content.release()
    image.close()


def wait_forever() -> None:
    while True:
        time.sleep(60)


def steps_on_the_network(worker: Any, payload: bytes) -> None:
    """Twelve steps, each with an all-reduce over the network and a copy of the state.

    Args:
        payload: folder in which the ranks tell that they have come to step 3, and wait for a file `open`.
    """
    import torch
    import torch.distributed as dist

    step = worker.memory_files.restore_step or 0
    if worker.restart is not None and worker.rank == 0:
        worker.supervisor_client.send_event({"kind": "restart", "step": step, **vars(worker.restart)})
    store = worker.store
    if store is None:
        store = dist.TCPStore(worker.store_host, worker.store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=worker.world_size)
    while step < 12:
        step += 1
        worker.supervisor_client.report_progress(step, "forward")
        if step == 3:
            gate = Path(payload.decode())
            (gate / str(worker.rank)).touch()
            while not (gate / "open").exists():
                time.sleep(0.01)
        total = torch.tensor([float(step)])
        dist.all_reduce(total)
        assert total.item() == step * worker.world_size
        worker.supervisor_client.report_finished_step(step)
        leave_image(worker, step)
        if worker.rank == 0:
            worker.supervisor_client.send_event(
                {"kind": "step", "step": step, "generation": worker.generation}
            )
        time.sleep(0.2)
    dist.destroy_process_group()


def write_lines(worker: Any, payload: bytes) -> None:
    """Rank 0 writes its generation every few milliseconds, as long as it may."""
    step = worker.memory_files.restore_step or 0
    while not worker.supervisor_client.is_drain_requested():
        step += 1
        worker.supervisor_client.report_progress(step, "forward")
        worker.supervisor_client.report_finished_step(step)
        leave_image(worker, step)
        if worker.rank == 0:
            worker.check_fence()
            with Path(payload.decode()).open("a") as file:
                file.write(f"{worker.generation}\n")
        time.sleep(0.01)
