"""Layout of the run directory, in which every room finds and leaves a run's files; a public interface.

runs/NAME/
    job.toml            the job as run, defaults and overrides included
    script.json         of `wanma launch`: the script, its processes, its end
    plan.json           the plan and its forecast
    environment.json    versions, host, devices, command line
    engine.json         of a submitted run: the submission, and the engine's name of it
    engine/             of a submitted run: its job, batch script, and the output of its supervisors
    data-parts.json     of `data.placement = "parts"`: the parts, and the nodes that had them
    servers.json        of `wanma resize --servers`: a request that the run has not taken
    returned.json       fingerprint of the weights that `wanma.train` has given to the user's module
    metrics.jsonl       one object per optimizer step
    events.jsonl        validations, checkpoints, messages, starts and ends
    logs/rank-N.log     standard output and error of each rank
    logs/rank-N.jsonl   of `wanma.log`: metrics of each rank but rank 0
    logs/bad-samples-N.jsonl  samples that rank N could not read, with `data.bad_data` other than refuse
    logs/node-N.jsonl   of `wanma launch`: use of processor, memory, network and GPUs, every few seconds
    logs/mpi-N.log      of `wanma launch --framework mpi`: output of mpirun, or of its daemon on node N
    checkpoints/        step-00000100/ ...; see docs/reference/checkpoint-format.md
    generations/        claims of the starts of the ranks; see `folder_claims`
    code/               commit and changes of the code: commit.json, diff.patch
    scratch/            tensors offloaded to disk, while the run lasts
    report.html         self-contained
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanma.job.errors import EXIT_USAGE, WanmaError


@dataclass(frozen=True)
class RunDirectory:
    """Paths of the files of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def job(self) -> Path:
        return self.path / "job.toml"

    @property
    def script(self) -> Path:
        """Record of a script of `wanma launch`; one without a session leaves this instead of a job."""
        return self.path / "script.json"

    @property
    def lock(self) -> Path:
        """File that the command of a run on one node holds locked."""
        return self.path / ".lock"

    @property
    def nodes_lock(self) -> Path:
        """File that the command of a run on several nodes holds locked, on one of those that share it."""
        return self.path / ".lock-nodes"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def engine(self) -> Path:
        """Record of the engine that the run was submitted to; a run in the foreground has none."""
        return self.path / "engine.json"

    @property
    def engine_files(self) -> Path:
        """Folder of the files of a submission: job, batch script, output of the supervisors."""
        return self.path / "engine"

    @property
    def data_parts(self) -> Path:
        """Parts of data that lie on different nodes, and the nodes that had them."""
        return self.path / "data-parts.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def code(self) -> Path:
        """Folder of the code's provenance: `commit.json` and `diff.patch`."""
        return self.path / "code"

    @property
    def scratch(self) -> Path:
        """Folder of tensors that the plan offloads to disk, while the run lasts."""
        return self.path / "scratch"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def rank_log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def rank_metrics(self, rank: int) -> Path:
        """Metrics that a script logs on a rank other than 0."""
        return self.path / "logs" / f"rank-{rank}.jsonl"

    def bad_samples(self, rank: int) -> Path:
        """Samples that a rank could not read and skipped or substituted."""
        return self.path / "logs" / f"bad-samples-{rank}.jsonl"

    def node_usage(self, node_rank: int) -> Path:
        """Use of processors, memory and network by a script's ranks on one node."""
        return self.path / "logs" / f"node-{node_rank}.jsonl"

    def mpi_log(self, node_rank: int) -> Path:
        """Output of mpirun on node 0, and of its daemon on another node."""
        return self.path / "logs" / f"mpi-{node_rank}.log"

    def create(self) -> None:
        """Create the folders.

        Raises:
            WanmaError: the folder cannot be written to.
        """
        try:
            for folder in (self.path, self.path / "logs", self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise self._unwritable(error.strerror or str(error)) from error

    def check_writable(self) -> None:
        """Refuse a folder that `create` could not write to; changes nothing.

        Raises:
            WanmaError: the folder cannot be written to.
        """
        nearest_folder = next(
            folder for folder in (self.path, *self.path.absolute().parents) if folder.exists()
        )
        if not nearest_folder.is_dir():
            raise self._unwritable(f"{nearest_folder} is not a folder")
        if not os.access(nearest_folder, os.W_OK | os.X_OK):
            raise self._unwritable(f"no permission to write to {nearest_folder}")

    def _unwritable(self, cause: str) -> WanmaError:
        return WanmaError(
            f"cannot write to the run directory {self.path}: {cause}",
            "choose another with --run-dir DIR, or make this one writable",
            EXIT_USAGE,
        )


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` completely or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_tail(path: Path, size: int) -> bytes:
    """Return the last `size` bytes of a file, or all of a smaller one.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read()


def list_runs(folder: Path) -> list[RunDirectory]:
    """List the runs below `folder` that this user may read, newest first."""
    if not folder.is_dir():
        return []
    runs = [RunDirectory(path) for path in folder.iterdir() if os.access(path, os.X_OK) and is_run(path)]
    return sorted(runs, key=_start_time, reverse=True)


def is_run(path: Path) -> bool:
    """Return True if a training, or a script of `wanma launch`, has run in folder `path` or waits there."""
    run = RunDirectory(path)
    return any(file.is_file() for file in (run.job, run.script, run.engine))


def _start_time(run: RunDirectory) -> float:
    """Return the Unix time in seconds of the newest start of the run."""
    return max(file.stat().st_mtime for file in (run.job, run.script, run.engine) if file.is_file())
