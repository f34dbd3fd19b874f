"""Placing of a run on its engine: what a training and a script have in common."""

from __future__ import annotations

import hmac
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE, load_rendezvous_secret
from wanma.engines.code.cache import unpack_snapshot
from wanma.engines.code.provenance import record_provenance
from wanma.engines.code.snapshot import make_snapshot
from wanma.engines.code.unpack import UnpackedSnapshot
from wanma.engines.engine import CODE_ARCHIVE_VARIABLE, PLACED_BY_VARIABLE, Engine, Submission
from wanma.engines.engine_record import (
    EngineRecord,
    make_engine_record,
    read_engine_record,
    write_engine_record,
)
from wanma.engines.environment.archive import make_archive, save_archive
from wanma.engines.environment.shared_folder import LOCAL_FOLDER, install_here, interpreter_path
from wanma.engines.selection import get_engine
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.import_path import CODE_FOLDER_VARIABLE
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.job.sections.cluster import ClusterSection


def is_placed(section: ClusterSection) -> bool:
    """Return True if this process is one that the engine, or the user's srun, has started on a node."""
    engine = section.engine
    is_step = engine == "slurm" and "SLURM_STEP_ID" in os.environ
    return is_step or os.environ.get(PLACED_BY_VARIABLE) == engine


def snapshot_code(run: RunDirectory, section: ClusterSection) -> tuple[Path | None, tuple[str, ...]]:
    """Pack the working directory for a run, and record its commit; return the archive and notes for the user.

    Raises:
        WanmaError: the folder is too large, or cannot be read.
    """
    if not section.code_snapshot or section.engine == "local":
        return None, ()
    run.create()
    runs = run.path if run.path.parent == Path.cwd() else run.path.parent
    snapshot = make_snapshot(Path.cwd(), run.path / "code", run_folder=runs)
    record_provenance(Path.cwd(), run, snapshot)
    return snapshot.path, snapshot.notes


def make_environment(run: RunDirectory, section: ClusterSection) -> str:
    """Make the environment of a run in a folder that all its nodes see; return its interpreter.

    Empty: the job has none, or the engine makes it on each host.

    Raises:
        WanmaError: the lock file cannot be used, or the environment cannot be made.
    """
    folder = _environment_folder(section)
    archive = make_archive(section, Path.cwd()) if folder is not None else None
    if archive is None or folder is None:
        return ""
    run.create()
    save_archive(archive, run.code)
    return install_here(archive, folder)


def environment_interpreter(section: ClusterSection) -> str:
    """Return the interpreter that `make_environment` would return; nothing is made.

    Raises:
        WanmaError: the lock file cannot be used.
    """
    folder = _environment_folder(section)
    archive = make_archive(section, Path.cwd()) if folder is not None else None
    return interpreter_path(archive, folder) if archive is not None and folder is not None else ""


def _environment_folder(section: ClusterSection) -> str | None:
    folders = {"local": LOCAL_FOLDER, "slurm": section.slurm.folder, "ray": section.ray.folder}
    return folders.get(section.engine)


def enter_code_snapshot() -> Path:
    """Unpack the code snapshot of the run that this process was started for; return it as the code folder."""
    archive = os.environ[CODE_ARCHIVE_VARIABLE]
    cache = Path(tempfile.gettempdir()) / f"wanma-code-{os.getuid()}"
    unpacked = unpack_snapshot(Path(archive), cache)
    _entered.append(unpacked)
    os.environ[CODE_FOLDER_VARIABLE] = str(unpacked.path)
    return unpacked.path


_entered: list[UnpackedSnapshot] = []
"""Snapshot of this process; it is locked against removal as long as it is referred to."""


def usable_engine(section: ClusterSection, engine: Engine | None = None) -> Engine:
    """Return the engine of a run: the given one, or a new one.

    Raises:
        WanmaError: it cannot be used here, or a key is set that it chooses itself.
    """
    engine = engine or get_engine(section.engine)
    if (reason := engine.unusable_reason()) is not None:
        raise WanmaError(
            f"the engine '{engine.name}' cannot be used here: {reason}",
            "`wanma engines` lists those that can; --engine local runs on this machine",
            EXIT_USAGE,
        )
    if engine.name != "local":
        for key in ("rendezvous", "node_rank"):
            if getattr(section, key) is not None:
                raise JobError(
                    f"cluster.{key} is set, and the engine '{engine.name}' chooses it itself",
                    f"remove it, or unset it on the command line: cluster.{key}=",
                )
    return engine


def refuse_active_run(run: RunDirectory) -> None:
    """Refuse a run directory whose run is in progress, and bring home the records of one that has ended.

    Raises:
        WanmaError: the run is in progress, or its engine does not answer.
    """
    record = read_engine_record(run)
    if record is None:
        return
    engine = get_engine(record.engine)
    (status,) = engine.statuses([record.handle])
    if status.state in ("pending", "running"):
        raise WanmaError(
            f"the run in {run.path} is {status.state} already ({record.engine} {', '.join(status.job_ids)})",
            f"`wanma attach {run.name}` shows it, `wanma cancel {run.name}` stops it; another run needs "
            "another --run-dir",
            EXIT_USAGE,
        )
    try:
        engine.fetch(record.handle)
    except WanmaError as error:  # as of hosts that are gone for good; the run may have others now
        print(f"warning: {error.message}", file=sys.stderr)


def run_secret(run: RunDirectory) -> str:
    """Return the shared secret of a submitted run: the user's own, or one derived from the user's file.

    The same user derives the same secret for the same run directory, so nodes that join later have it, and
    it is in no file of the run.
    """
    if given := os.environ.get(SECRET_VARIABLE, ""):
        return given
    key = load_rendezvous_secret(is_loopback=True, environment=os.environ)
    return hmac.new(key, str(run.path.resolve()).encode(), "sha256").hexdigest()


def place_run(
    run: RunDirectory, engine: Engine, submission: Submission, files: Mapping[str, str]
) -> EngineRecord:
    """Write the files of a submission, submit it, and record it.

    In a shell that has an allocation already, this process becomes the command which runs it there.

    Args:
        run: run directory.
        engine: engine of the run.
        submission: supervisors to place.
        files: texts of files in the folder of the submission, by name.

    Raises:
        WanmaError: the run directory cannot be written to, or the engine refuses.
    """
    run.create()
    try:
        run.engine_files.mkdir(exist_ok=True)
        for name, text in files.items():
            write_atomically(run.engine_files / name, text)
    except OSError as error:
        raise WanmaError(
            f"cannot write to {run.engine_files}: {error.strerror or error}",
            "free space on its disk, or choose another with --run-dir DIR",
            EXIT_USAGE,
        ) from error
    if (command := engine.foreground_command(submission)) is not None:
        os.environ[SECRET_VARIABLE] = submission.secret
        os.execvp(command[0], command)
    record = make_engine_record(engine.name, submission, engine.submit(submission))
    write_engine_record(run, record)
    return record
