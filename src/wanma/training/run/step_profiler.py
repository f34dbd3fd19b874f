"""Profiler of some steps of a run that goes on, when it is asked for: `wanma profile RUN`.

While nobody asks, a step costs one read of the shared page of the supervisor.
"""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path
from typing import Any

import torch

from wanma.job.run.profile_request import ProfileRequest, read_profile_request, trace_file
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext


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

    def after_step(self, step: int) -> None:
        """Begin or end a profile after a step, if one was asked for."""
        number = self._worker.supervisor_client.profile_request()
        if number != self._seen:
            self._seen = number
            self._begin(step, number)
        elif self._profile is not None and step >= self._last_step:
            self._end()

    def _begin(self, step: int, number: int) -> None:
        request = read_profile_request(self._run, number)
        if request is None or self._profile is not None or self._worker.rank not in request.ranks:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._is_on_gpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._request, self._last_step = request, step + request.steps
        self._profile = torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True)
        self._profile.__enter__()

    def _end(self) -> None:
        assert self._request is not None
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        path = trace_file(self._run, self._request.number, self._worker.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(profile, path)


def write_trace(profile: Any, path: Path) -> None:
    """Write a profile as a compressed trace of Chrome's format, which Perfetto reads, whole or not at all."""
    plain = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    profile.export_chrome_trace(str(plain))
    packed = plain.with_name(f"{plain.name}.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes(), 5))
    plain.unlink()
    packed.replace(path)
