"""Loader processes of a user's dataset: the same samples as threads read, and what happens when one dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch

from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no other process can import a test

TRAIN = TrainSection(steps=6, global_batch=4, seed=3)


class Drawn:
    """Samples with numbers of all three generators, and the process that read them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
        return {"input": drawn, "process": os.getpid(), "target": index}


class Failing(Drawn):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.index:
            self.act()
        return super().__getitem__(index)

    def __init__(self, index: int, act: Callable[[], None]) -> None:
        self.index, self.act = index, act


def opened(dataset: Any, **keys: Any) -> Any:
    return open_dataset(DataSection(**{"workers": 2, "worker_processes": True, **keys}), TRAIN, dataset)


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    before = _children()  # ranks that tests of other files reuse
    yield
    import gc

    gc.collect()
    deadline = time.monotonic() + 20
    while _children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _children() - before == set()


def _children() -> set[int]:
    import multiprocessing

    return {process.pid or 0 for process in multiprocessing.active_children()}


def _runs(process: int) -> bool:
    """Return whether a process runs; this one may have to collect the ended orphans of other tests."""
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_processes_give_what_threads_give_in_the_same_order() -> None:
    by_threads = opened(Drawn(), worker_processes=False)
    by_processes = opened(Drawn())
    plan = Plan(micro_batch=2)
    with (
        StepLoader(by_threads, plan, TRAIN, 0, 0, prefetch=2) as expected,
        StepLoader(by_processes, plan, TRAIN, 0, 0, prefetch=3, threads=2) as found,
    ):
        processes = set()
        for one, other in zip(expected, found, strict=True):
            for batch, same in zip(one.micro_batches, other.micro_batches, strict=True):
                assert torch.equal(batch.inputs[0], same.inputs[0])
                assert batch.targets.tolist() == same.targets.tolist()
                assert batch.samples.tolist() == same.samples.tolist()
                assert "/memfd:wanma-batch" in Path("/proc/self/maps").read_text()
                processes |= set(same.keywords["process"].tolist())
    assert os.getpid() not in processes
    assert 1 <= len(processes) <= 2
    assert by_processes.load_times.take()["dataset"] > 0
    validation = by_processes.validation_batch([0])
    assert validation.targets.tolist() == by_threads.validation_batch([0]).targets.tolist()


def test_an_error_in_a_process_is_the_error_of_the_sample() -> None:
    def fail() -> None:
        raise ValueError("no such picture")

    data = opened(Failing(11, fail), validation_fraction=0)
    with pytest.raises(WanmaError, match=r"sample 11 of Failing .*no such picture"):
        data.batch(range(40))
    assert len(data.batch(range(1)).targets) == 1, "the process goes on"


def test_a_process_that_dies_is_named() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    data = opened(Failing(7, die), validation_fraction=0)
    with pytest.raises(WanmaError, match=r"process \d of Failing .*SIGKILL"):
        data.batch(range(40))


def test_an_interrupted_request_leaves_no_answer_to_the_next() -> None:
    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    parent = os.getpid()

    def interrupt_parent() -> None:
        os.kill(parent, signal.SIGUSR1)
        time.sleep(0.5)

    data = opened(Failing(7, interrupt_parent), workers=1, shuffle="none", validation_fraction=0)
    earlier = signal.signal(signal.SIGUSR1, raise_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            data.batch(range(7, 8))
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    assert data.batch(range(3, 4)).targets.tolist() == [3]


PARENT = """\
import os, sys, time
from wanma.data.opening import open_dataset
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

class Processes:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return {"input": 1.0, "process": os.getpid(), "target": index}

if __name__ == "__main__":
    section = DataSection(workers=1, worker_processes=True, validation_fraction=0)
    data = open_dataset(section, TrainSection(), Processes())
    print(data.batch(range(4)).keywords["process"][0].item(), flush=True)
    time.sleep(60)
"""


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE) as parent:
        process = int(parent.stdout.readline())
        assert _runs(process)
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(process)


def test_a_dataset_that_cannot_be_pickled_is_refused_by_its_key() -> None:
    class Locked(Drawn):
        def __init__(self) -> None:
            import threading

            self.lock = threading.Lock()

    with pytest.raises(JobError, match=r"worker_processes: Locked .* pickled"):
        opened(Locked()).batch([0])
