"""Profiler of some steps of a run that goes on, when it is asked for: `wanma profile RUN`.

While nobody asks, a step costs one read of the shared page of the supervisor. A profile that fails is
dropped: it never ends the run.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from wanma.job.run.profile_request import ProfileRequest, read_profile_request, trace_file
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.torch_internals.loaded import is_profiler_on

CLOSE_SECONDS = 10.0
"""Longest wait at the end of a rank for a trace that is being written."""


class StepProfiler:
    """Profiler of one rank.

    Args:
        worker: the rank.
        is_on_gpu: True if kernels of a GPU are recorded, too.
    """

    def __init__(self, worker: WorkerContext, *, is_on_gpu: bool) -> None:
        self._worker, self._is_on_gpu = worker, is_on_gpu
        self._run = RunDirectory(worker.run_directory)
        self._seen = worker.supervisor_client.profile_request()
        self._request: ProfileRequest | None = None
        self._profile: Any = None
        self._last_step = 0
        self._writer: threading.Thread | None = None

    def after_step(self, step: int) -> None:
        """Begin or end a profile after a step, if one was asked for."""
        number = self._worker.supervisor_client.profile_request()
        if number != self._seen:
            self._seen = number
            self._begin(step, number)
        elif self._profile is not None and step >= self._last_step:
            self._end()

    def close(self, failed: bool) -> None:
        """End a profile that goes on, with the steps so far, and wait for its trace.

        A failed rank drops both: its peers wait for the restart.
        """
        if self._profile is not None:
            self._end(writes=not failed)
        if self._writer is not None and not failed:
            self._writer.join(CLOSE_SECONDS)

    def _begin(self, step: int, number: int) -> None:
        try:
            request = read_profile_request(self._run, number)
            if request is None or self._profile is not None or self._worker.rank not in request.ranks:
                return
            if is_profiler_on():  # its trace would be lost
                raise RuntimeError("another profiler is on")
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._is_on_gpu:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            profile = torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True)
            profile.__enter__()
        except Exception as error:
            _report(error)
        else:
            self._profile, self._request, self._last_step = profile, request, step + request.steps

    def _end(self, *, writes: bool = True) -> None:
        assert self._request is not None
        profile, self._profile = self._profile, None
        path = trace_file(self._run, self._request.number, self._worker.rank)
        try:
            profile.__exit__(None, None, None)
            if not writes:
                return
            # In a thread: peers wait for a rank that writes.
            self._writer = threading.Thread(
                target=_write, args=(profile, path), name="wanma-profile", daemon=True
            )
            self._writer.start()
        except Exception as error:
            _report(error)


def _write(profile: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(profile, path)
    except Exception as error:  # such as a full disk
        _report(error)


def _report(error: Exception) -> None:
    print(f"no profile: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def write_trace(profile: Any, path: Path) -> None:
    """Write a profile as a compressed trace of Chrome's format, which Perfetto reads, whole or not at all."""
    plain = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    packed = plain.with_name(f"{plain.name}.gz")
    try:
        profile.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        packed.replace(path)
    finally:
        for rest in (plain, packed):
            rest.unlink(missing_ok=True)
