"""Python environments that a suite, or a file of pins, asks for."""

from __future__ import annotations

from pathlib import Path

from wanma.bench.environments.python_environment import (
    PythonEnvironment,
    environments_folder,
    find_environment,
)
from wanma.bench.suites.suite_file import find_suite
from wanma.bench.suites.suite_of_job import read_suite_or_job


def environments_of(subject: str, folder: Path | None = None) -> list[PythonEnvironment]:
    """Return the Python environments of a suite, or that of a file of pins, as they are on this machine.

    Args:
        subject: name of a shipped suite, suite file, or file of pins, NAME.txt.
        folder: folder of the environments; default: see `environments_folder`.

    Raises:
        WanmaError: there is no such file or suite, or it is wrong.
    """
    path = Path(subject)
    if path.suffix == ".txt":
        return [find_environment(path.stem, path, environments_folder(folder))]
    suite, _ = read_suite_or_job(find_suite(subject), environments=folder)
    return suite.python_environments
