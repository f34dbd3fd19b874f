"""Suite of a result as it was measured, in its folder: contenders, rule and limits, to run it again.

It names no folder of the machine: commands have the words of `places`, and folders are relative, so that a
result can be run again in another clone.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from wanma.bench.meter.disturbance import DisturbanceLimits
from wanma.bench.programs.contender import Contender
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.runner import Rule
from wanma.bench.suites.suite_file import SHIPPED, Suite, SuiteFile
from wanma.job.errors import WanmaError

SUITE_FILE = "suite.json"
"""Name of the file. Only its owner may read it: environment variables of contenders may be secrets."""


@dataclass(frozen=True)
class StoredSuite:
    """Suite of a result, and all that a second measurement needs."""

    suite: Suite
    rule: Rule
    limits: DisturbanceLimits
    working_folder: Path | None
    """Working directory of the measurement, if the result lies in it; None: that of the caller will do."""


def write_stored_suite(
    directory: ResultDirectory, suite: Suite, rule: Rule, limits: DisturbanceLimits
) -> None:
    """Write the suite into the folder of its result.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    content = {
        "name": suite.name,
        "file": suite.file.model_dump(exclude_unset=True),
        "contenders": [contender.to_json() for contender in suite.contenders],
        "digest": suite.digest,
        "job_text": suite.job_text,
        "rule": rule.model_dump(),
        "limits": asdict(limits),
        "working_folder": _working_folder(directory),
        **_suite_folder(suite),
    }
    partial = directory.path / f"{SUITE_FILE}.{os.getpid()}.partial"
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
        partial.replace(directory.path / SUITE_FILE)
    except OSError as error:
        raise directory.unwritable(error) from error


def read_stored_suite(directory: ResultDirectory) -> StoredSuite:
    """Return suite, rule and limits of a result, as it was measured.

    Raises:
        WanmaError: the folder has none.
    """
    path = directory.path / SUITE_FILE
    try:
        content = json.loads(path.read_text())
        working = content.get("working_folder", "")
        working_folder = (directory.path / working).resolve() if working else None
        place, folder = content.get("place", ""), content.get("folder", ".")
        suite = Suite(
            content["name"],
            SuiteFile.model_validate(content["file"]),
            tuple(Contender.from_json(one) for one in content["contenders"]),
            content["digest"],
            content["job_text"],
            SHIPPED if place else (working_folder or Path()) / folder,
        )
        return StoredSuite(
            suite, Rule(**content["rule"]), DisturbanceLimits(**content["limits"]), working_folder
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WanmaError(
            f"{path} cannot be read: {error}", "only a result whose folder is complete can be run again"
        ) from error


def _working_folder(directory: ResultDirectory) -> str:
    """Return the working directory relative to the result; empty: the result lies elsewhere."""
    result, here = directory.path.resolve(), Path.cwd()
    return os.path.relpath(here, result) if result.is_relative_to(here) else ""


def _suite_folder(suite: Suite) -> dict[str, str]:
    """Return the place of a suite: the folder of shipped suites, or one relative to this folder."""
    if suite.folder.resolve() == SHIPPED.resolve():
        return {"place": SHIPPED.name}
    return {"folder": os.path.relpath(suite.folder.resolve())}
