"""Environment in a folder that all nodes of a run see, made by the process that submits the run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from wanma.engines.environment import install
from wanma.engines.environment.archive import EnvironmentArchive
from wanma.engines.environment.progress import InstallProgress
from wanma.job.errors import WanmaError

LOCAL_FOLDER = "~/.wanma"
"""Folder of the engine `local`."""
FOLDER = "environments"
"""Folder of the environments, in the engine's folder."""


def install_here(archive: EnvironmentArchive, folder: str) -> str:
    """Return the interpreter of the environment, which is made unless it exists.

    Args:
        archive: the environment.
        folder: folder of the engine, which all nodes see; `~` is the home folder.

    Raises:
        WanmaError: the environment cannot be made.
    """
    place = socket.gethostname()
    root = str(Path(folder).expanduser() / FOLDER)
    try:
        if (found := install.find(root, archive.digest)) is not None:
            return found
        progress = InstallProgress(archive, [place])
        progress.start(place)
        made = install.install(
            root,
            archive.digest,
            archive.data,
            archive.values(os.environ),
            lambda text: progress.update(place, text),
            lambda: False,
        )
    except install.InstallError as problem:
        raise WanmaError(f"{place}: {problem.message}", problem.hint) from problem
    progress.end(place, is_new=made["is_new"])
    return str(made["python"])


def interpreter_path(archive: EnvironmentArchive, folder: str) -> str:
    """Return the interpreter that `install_here` returns, without making the environment."""
    root = Path(folder).expanduser() / FOLDER
    return str(root / install.environment_name(archive.digest) / "bin" / "python")


@contextlib.contextmanager
def environment_in_use(interpreter: str) -> Iterator[tuple[int, ...]]:
    """Yield descriptors that keep an environment from removal while a process has them open.

    Args:
        interpreter: interpreter of the environment; empty: there is none to keep.

    Raises:
        WanmaError: the environment was removed, or its lock file cannot be locked.
    """
    if not interpreter:
        yield ()
        return
    environment = Path(interpreter).parents[1]
    lock_file = environment.with_name(f"{environment.name}.lock")
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(lock_file.open())
            fcntl.flock(lock, fcntl.LOCK_SH)  # waits for a process that makes or removes the environment
            while not install.is_same_file(lock.fileno(), str(lock_file)):
                stack.close()  # removed between open and lock, and perhaps made again
                lock = stack.enter_context(lock_file.open())
                fcntl.flock(lock, fcntl.LOCK_SH)
            (environment / install.COMPLETE).stat()
        except FileNotFoundError:
            raise WanmaError("the environment is gone", "submit the run again") from None
        except OSError as error:
            raise WanmaError(
                f"cannot lock {lock_file}: {error.strerror}", "correct its owner and permissions"
            ) from error
        with contextlib.suppress(OSError):
            os.utime(lock_file)
        yield (lock.fileno(),)
