"""Record of what this node and its ranks use: processor time, memory, disks, network and GPUs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wanma.elastic.launch_config import get_node_name
from wanma.elastic.transport.event_loop import EventLoop, Timer
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.metrics.gpu import GpuReader, GpuReading, open_gpu_reader
from wanma.observe.metrics.node_usage import read_node_usage
from wanma.observe.metrics.process_usage import (
    read_anonymous_bytes,
    read_network_bytes,
    read_process_table,
    sum_trees,
)
from wanma.observe.sinks.jsonl import AppendFile, to_json_line

FIRST_SAMPLE_SECONDS, SAMPLE_INTERVAL_SECONDS = 0.5, 5.0
"""Time, in seconds, to the first reading, and the longest between two; in between it doubles."""
RECORDS_AT_FULL_RATE, LONGEST_RECORD_INTERVAL_SECONDS = 720, 60.0
"""Number of readings that are all recorded, an hour's, and the longest time between two records later."""


class UsageRecorder:
    """Recorder that reads every few seconds until it is closed, and appends lines, ever less often.

    Files are read and written in a thread: a store that does not answer must not stop the heartbeats.

    Args:
        run: run directory.
        node_rank: node rank of this node.
        interface: network interface of the run; None: unknown.
        loop: event loop.
        pids: returns the process number of each living rank.
        progress: returns further values of each rank by name, such as its step.
        on_event: gets each reading as an event of kind `usage`.
        look: called in that thread, too, with each reading.
        on_look: gets what it has returned.
    """

    def __init__(
        self,
        run: RunDirectory,
        node_rank: int,
        interface: str | None,
        loop: EventLoop,
        pids: Callable[[], Mapping[int, int]],
        progress: Callable[[], Mapping[int, Mapping[str, Any]]] = dict,
        on_event: Callable[[Event], object] = lambda _: None,
        look: Callable[[], Any] = lambda: None,
        on_look: Callable[[Any], object] = lambda _: None,
    ) -> None:
        self._run, self._node_rank = run, node_rank
        self._interface, self._loop, self._pids = interface, loop, pids
        self._progress, self._on_event = progress, on_event
        self._look, self._on_look = look, on_look
        self._newest: dict[int, dict[str, Any]] = {}
        """Newest use of each rank, those that have ended included."""
        self._gpus = NodeGpus(loop)
        self._network_start = read_network_bytes(interface)
        self._interval, self._began, self._next_record = FIRST_SAMPLE_SECONDS, time.monotonic(), 0.0
        self._is_closed = self._is_reading = False
        self._file: AppendFile | None = None
        with contextlib.suppress(OSError):  # a full disk does not end the run
            self._file = AppendFile(run.node_usage(node_rank))
        self._timer: Timer = loop.call_later(self._interval, self._sample)

    def close(self) -> None:
        """Stop recording; a second call does nothing."""
        self._is_closed = True
        self._timer.cancel()
        if not self._is_reading:  # else its thread may write now
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _sample(self) -> None:
        self._gpus.request()
        pids, progress = dict(self._pids()), dict(self._progress())
        self._is_reading = True
        self._loop.call_in_thread(lambda: self._read(pids, progress), self._store, "wanma-usage")

    def _read(
        self, pids: Mapping[int, int], progress: Mapping[int, Mapping[str, Any]]
    ) -> tuple[dict[str, Any] | None, Any]:
        """Read and record the present use; None: something could not be read."""
        try:
            record = self._read_record(pids, progress)
            self._record(record)
            return record, self._look()
        except Exception:  # what cannot be read here costs the record, not the run
            return None, None

    def _record(self, record: dict[str, Any]) -> None:
        file, now = self._file, time.monotonic()
        if file is not None and now >= self._next_record:
            pause = (now - self._began) / RECORDS_AT_FULL_RATE
            self._next_record = now + min(pause, LONGEST_RECORD_INTERVAL_SECONDS)
            with contextlib.suppress(OSError):
                file.write(to_json_line(record))

    def _store(self, answer: tuple[dict[str, Any] | None, Any]) -> None:
        record, seen = answer
        self._is_reading = False
        if self._is_closed:
            self._close_file()
            return
        self._on_look(seen)
        if record is not None:
            self._on_event({"kind": "usage", "node": self._node_rank, **record})
        self._interval = min(2 * self._interval, SAMPLE_INTERVAL_SECONDS)
        self._timer = self._loop.call_later(self._interval, self._sample)

    def _read_record(
        self, pids: Mapping[int, int], progress: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the present use of the node and of each rank; of one that has ended, the last."""
        usages = sum_trees(read_process_table(), pids.values())
        for rank, pid in pids.items():
            if pid in usages:
                memory, earlier = usages[pid].memory_bytes, self._newest.get(rank)
                self._newest[rank] = {
                    "rank": rank,
                    "cpu_seconds": usages[pid].cpu_seconds,
                    "memory_bytes": memory,
                    "peak_memory_bytes": max(memory, earlier["peak_memory_bytes"] if earlier else 0),
                    "anonymous_bytes": read_anonymous_bytes(pid),
                    **progress.get(rank, {}),
                }
        ranks = [
            {
                **self._newest[rank],
                "is_alive": rank in pids or bool(progress.get(rank, {}).get("has_finished")),
                "log_bytes": _size(self._run.rank_log(rank)),
            }
            for rank in sorted(self._newest)
        ]
        record: dict[str, Any] = {"time": time.time(), "host": get_node_name(), "ranks": ranks}
        record |= read_node_usage(self._run.path)
        now = read_network_bytes(self._interface)
        if now is not None and self._network_start is not None:
            received, sent = (end - start for end, start in zip(now, self._network_start, strict=True))
            record |= {"network_received_bytes": received, "network_sent_bytes": sent}
        if readings := self._gpus.readings:
            by_gpu = dict(zip(used_gpus(len(readings), pids.values()), sorted(self._newest), strict=False))
            record["gpus"] = [
                {
                    "gpu": number,
                    **asdict(gpu),
                    "is_used": number in by_gpu,
                    "rank": by_gpu.get(number),
                    "needed_memory_bytes": needed_memory_bytes(gpu, self._newest.get(by_gpu.get(number, -1))),
                }
                for number, gpu in enumerate(readings)
            ]
        return record


def needed_memory_bytes(gpu: GpuReading, rank: Mapping[str, Any] | None) -> float | None:
    """Return the memory of a GPU in use that PyTorch cannot free; None: the rank's allocator is unknown.

    The allocator keeps what its tensors have left, so that a GPU may be full in a healthy run.

    Args:
        gpu: state of the GPU.
        rank: newest use of the rank on it; None: there is none.
    """
    if rank is None or gpu.memory_bytes is None or "cached_bytes" not in rank:
        return None
    return gpu.memory_bytes - float(rank["cached_bytes"])


def used_gpus(count: int, processes: Iterable[int], folder: Path = Path("/proc")) -> Sequence[int]:
    """Return the number of the GPU of each rank of the node; empty if no rank has opened one.

    Args:
        count: number of GPUs.
        processes: process number of each rank; as many GPUs are used at most.
        folder: where the kernel's files are.
    """
    processes = list(processes)
    if not any(_has_gpu(folder / str(process)) for process in processes):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [int(word) for word in visible.split(",") if word.strip().isdecimal()] or range(count)
    return tuple(numbers)[: len(processes)]


def _has_gpu(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(str(link.readlink()).startswith("/dev/nvidia") for link in (process / "fd").iterdir())
    return False


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0: there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class NodeGpus:
    """State of this node's GPUs, read in a thread: a driver answers late, or never if its GPU hangs.

    Args:
        loop: event loop.
        open_reader: returns the reader of the GPUs; None: there are none.
    """

    def __init__(
        self, loop: EventLoop, open_reader: Callable[[], GpuReader | None] = open_gpu_reader
    ) -> None:
        self._loop, self._open_reader = loop, open_reader
        self.readings: Sequence[GpuReading] = ()
        """Newest state of each GPU; empty: there are none, or no answer has come yet."""
        self._reader: GpuReader | None = None
        self._is_asked = False
        """True while an answer is awaited, and for good without a GPU or after an error of its driver."""

    def request(self) -> None:
        """Ask for the state, unless an earlier answer is still awaited."""
        if not self._is_asked:
            self._is_asked = True
            self._loop.call_in_thread(self._read, self._store, "wanma-gpus")

    def _read(self) -> Sequence[GpuReading]:
        try:
            self._reader = self._reader or self._open_reader()
            return self._reader.read() if self._reader is not None else ()
        except Exception:  # a driver that fails costs the record, not the run
            return ()

    def _store(self, readings: Sequence[GpuReading]) -> None:
        self.readings, self._is_asked = readings, not readings
