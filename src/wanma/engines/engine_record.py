"""Record of a run's engine in the run directory: engine.json with the submission and the engine's handle."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wanma.data.stores.file_locks import exclusive_lock
from wanma.engines.engine import NOTES_KEY, Handle, Submission
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.job.sections.cluster import ClusterSection


@dataclass(frozen=True)
class EngineRecord:
    """Content of engine.json."""

    engine: str
    handle: Handle
    submission: dict[str, Any]
    """Submission without its secret."""
    submitted: float
    """Time of the submission, in unix seconds."""

    @property
    def is_script(self) -> bool:
        """True if the run is a script of `wanma launch`, and not a job."""
        return list(self.submission.get("command", ()))[:1] == ["launch"]

    @property
    def notes(self) -> list[str]:
        """Sentences of the engine for the user who submits the run."""
        return list(self.handle.get(NOTES_KEY, ()))

    def read_submission(self, secret: str) -> Submission:
        """Return the submission, completed by the secret."""
        values = dict(self.submission)
        for name in ("run_directory", "folder", "code"):
            values[name] = Path(values[name]) if values.get(name) is not None else None
        values["command"] = tuple(values["command"])
        values["settings"] = ClusterSection.model_validate(values["settings"])
        return Submission(**values, secret=secret)


def make_engine_record(engine: str, submission: Submission, handle: Handle) -> EngineRecord:
    """Return the record of a run that was submitted now."""
    values = asdict(replace(submission, settings=None, secret=""))  # type: ignore[arg-type]
    del values["secret"], values["job_text"]
    values |= {
        "run_directory": str(submission.run_directory),
        "folder": str(submission.folder),
        "code": str(submission.code) if submission.code is not None else None,
        "settings": submission.settings.model_dump(mode="json", exclude_unset=True),
    }
    return EngineRecord(engine, handle, values, time.time())


def write_engine_record(run: RunDirectory, record: EngineRecord) -> None:
    """Write engine.json, atomically.

    Raises:
        WanmaError: the run directory cannot be written to.
    """
    try:
        write_json(run.engine, asdict(record))
    except OSError as error:
        raise WanmaError(
            f"cannot write {run.engine}: {error.strerror or error}",
            "free space on its disk, or correct its permissions",
        ) from error


def change_handle(run: RunDirectory, change: Callable[[EngineRecord], Handle]) -> EngineRecord:
    """Replace the handle of a submitted run by that which `change` returns; one process at a time.

    Raises:
        WanmaError: the run was not submitted, its record cannot be read or written, or `change` fails.
    """
    run.engine_files.mkdir(exist_ok=True)
    with exclusive_lock(run.engine_files / ".lock", math.inf):
        record = read_engine_record(run)
        if record is None:
            raise WanmaError(f"the run in {run.path} was not submitted to an engine")
        changed = replace(record, handle=change(record))
        if changed != record:
            write_engine_record(run, changed)
        return changed


def read_engine_record(run: RunDirectory) -> EngineRecord | None:
    """Read engine.json; None: the run was started without an engine, on this machine.

    Raises:
        WanmaError: the file is damaged.
    """
    try:
        values = json.loads(run.engine.read_text(encoding="utf-8"))
        return EngineRecord(
            str(values["engine"]),
            dict(values["handle"]),
            dict(values["submission"]),
            float(values["submitted"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WanmaError(
            f"{run.engine} cannot be read: {error}",
            "ask the scheduler itself for the run, and remove that file",
        ) from error
