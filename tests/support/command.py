"""The command `wanma` in processes of its own, as a user starts it, with a tiny corpus to train on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from wanma.checkpoint.load.reader import find_newest_valid, load_full_tensors
from wanma.cli.main import main
from wanma.hardware.native.native_library import library_folder

WANMA = (sys.executable, "-m", "wanma")
LIMIT_SECONDS = 280.0
"""Limit of a wait for a command or for one of its events, below the limit of a test (pyproject.toml)."""
TEXT_JOB = """\
[model]
family = "decoder"
layers = 1
hidden = 16
heads = 2
[data]
text = ["corpus"]
sequence_length = 16
validation_fraction = 0.2
cache = "cache"
[train]
steps = 60
global_batch = 4
validation_samples = 2
deterministic = true
[parallel]
dp_replicate = 2
[checkpoint]
every_steps = 5
[observe]
log_every_steps = 1
"""
OWN_JOB = """\
[model]
factory = "faulty:model"
[data]
factory = "faulty:data"
[train]
steps = 8
global_batch = 4
[parallel]
dp_replicate = 2
[checkpoint]
every_steps = 2
"""


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def check(self, code: int = 0) -> Ran:
        """Fail unless this is the exit code; the message begins with it."""
        assert self.code == code, f"exit code {self.code} instead of {code}\n{self.text}"
        return self

    def lines(self, rank: int) -> list[str]:
        """Lines that a rank has printed."""
        mark = f"[rank {rank}] "
        return [line.removeprefix(mark) for line in self.out.splitlines() if line.startswith(mark)]

    def told_once(self) -> str:
        """The text, after a look that it tells one error and no traceback."""
        assert self.text.count("error: ") == 1, self.text
        assert "Traceback" not in self.text, self.text
        return self.text


def share_compiled(cache: Path) -> None:
    """Let the cache folder `cache` have the compiled code of the user's: it is the same in all."""
    mine = library_folder()
    mine.mkdir(parents=True, exist_ok=True)
    (cache / "wanma").mkdir(parents=True)
    (cache / "wanma" / mine.name).symlink_to(mine)


class Desk:
    """A folder with job files (`text.toml`, `own.toml`) and a corpus, in which commands run."""

    def __init__(self, folder: Path, modules: Path) -> None:
        self.folder = folder
        _DESKS.append(self)
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")])),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CACHE_HOME": str(folder / "home-cache"),
        }
        share_compiled(folder / "home-cache")
        (folder / "text.toml").write_text(TEXT_JOB)
        (folder / "own.toml").write_text(OWN_JOB)
        (folder / "corpus").mkdir()
        for number in range(20):
            text = f"def f{number}(x):\n    return x + {number}\n\n\n" * 10
            (folder / "corpus" / f"{number}.py").write_text(text)

    def run(self, *arguments: str, seconds: float = LIMIT_SECONDS) -> Ran:
        """Run `wanma` with `arguments` to its end."""
        return self.start(*arguments).end(seconds)

    def call(self, *arguments: str) -> Ran:
        """Run `wanma` with `arguments` in this process, which saves the start of another.

        For commands that read files, or that refuse before they start processes.
        """
        out, err = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self._environment),
            chdir(self.folder),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main(arguments)
        return Ran(code, out.getvalue(), err.getvalue())

    def start(self, *arguments: str, before: tuple[str, ...] = (), **environment: str) -> Running:
        return self.start_program([*before, *WANMA, *arguments], **environment)

    def start_program(self, command: list[str], **environment: str) -> Running:
        """Start any command here; its own session, so that what it leaves behind can be found."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_mind_signals,
        )
        return Running(process)

    def training(self, name: str) -> Training:
        return Training(self.folder / name)

    def trained(self, job: str, name: str, *overrides: str) -> Training:
        """The finished run `name` of the job file `job`.toml, trained once for all tests that ask for it."""
        training = self.training(name)
        if not training.path.exists():
            self.run("train", f"{job}.toml", "--run-dir", name, *overrides).check()
        return training


_DESKS: list[Desk] = []


def end_commands() -> None:
    """SIGKILL to all that was started at a desk and still runs, with what it has started itself.

    After a test that failed: the training that it meant to wait for would run beside all later tests.
    """
    marks = {f"XDG_STATE_HOME={desk.folder / 'state'}\0".encode() for desk in _DESKS}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes()
            if any(mark in environment for mark in marks):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:  # it has ended, or belongs to another user
            continue


def _mind_signals() -> None:
    """A shell lets what it starts in the background ignore these, and all that this starts."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Running:
    """A command that goes on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.family: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """The processes below the command, now; they are remembered for `left`."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.family.update({one.pid: one for one in below})
        return below

    def until(self, condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> bool:
        """Wait for the condition; False when the command ended before it held."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.005)
        return True

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = LIMIT_SECONDS) -> Ran:
        """Wait for the end."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.look()
            self.kill_all()
            raise
        return Ran(self.process.returncode, out, err)

    def kill_all(self) -> None:
        """SIGKILL to the command and all below it at once."""
        everybody = [self.process.pid, *(one.pid for one in self.look())]
        for pid in everybody:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def left(self, seconds: float = 60) -> list[psutil.Process]:
        """Processes ever seen below the command that are still there after `seconds`."""
        _, alive = psutil.wait_procs(self.family.values(), timeout=seconds)
        return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


class Training:
    """A run directory, as a test wants to see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return list(self._lines("metrics.jsonl"))

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(self._lines("events.jsonl"))

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == "validation"]

    @property
    def validation_losses(self) -> list[float]:
        return [event["loss"] for event in self.validations]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.metrics]

    @property
    def messages(self) -> str:
        return "\n".join(event["text"] for event in self.events if event["kind"] == "message")

    def steps_begun(self) -> int:
        """Lines of metrics.jsonl, whole or not: how far the run has come."""
        path = self.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def rank_process(self, rank: int) -> int | None:
        """Process of a rank of the newest start; None when it has not said so yet."""
        log = self.path / "logs" / f"rank-{rank}.log"
        found = re.findall(r"process (\d+)", log.read_text()) if log.exists() else []
        return int(found[-1]) if found else None

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.path / "checkpoints").glob("step-*"))

    def state(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint of `step`, or of the newest whole one."""
        folder = self.path / "checkpoints"
        path = find_newest_valid(folder) if step is None else folder / f"step-{step:08d}"
        assert path is not None
        return load_full_tensors(path)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.path / name
        return map(json.loads, path.read_text().splitlines()) if path.exists() else iter(())


def assert_bitwise_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Folder of a control group with so much memory; needs root."""
    name = f"wanma-test-{os.getpid()}"
    v1, v2 = Path("/sys/fs/cgroup/memory") / name, Path("/sys/fs/cgroup") / name
    group, limit = (v1, "memory.limit_in_bytes") if v1.parent.is_dir() else (v2, "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group of one's own can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip("the memory controller is not there for control groups of one's own")
        (group / limit).write_text(str(limit_bytes))
        yield group
    finally:
        group.rmdir()


@contextmanager
def small_memory(limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """The words before a command that put it into a control group with so much memory; needs root."""
    with memory_group(limit_bytes) as group:
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"


@contextmanager
def small_disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A file system of `size` at `folder`; needs root."""
    folder.mkdir(exist_ok=True)
    words = ",".join([f"size={size}", *options])
    subprocess.run(["mount", "-t", "tmpfs", "-o", words, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
