"""Python environment of a command: a virtual environment with pinned packages, which its user has made.

Nothing here installs a package. An environment that is missing, or whose versions differ from the pins, is
refused with the command that makes it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from wanma.engines.environment.lock_file import canonical
from wanma.job.errors import EXIT_USAGE, WanmaError

FOLDER_VARIABLE = "WANMA_BENCH_ENVIRONMENTS"
"""Environment variable of the folder of the environments."""
DEFAULT_FOLDER = Path("bench-environments")
LIST_SECONDS = 60.0
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;,*\\]+)(?:\s+--hash=\S+)*\s*\\?")
_LIST_PROGRAM = """\
import importlib.metadata as metadata, json, platform
found = {"python": platform.python_version()}
for one in metadata.distributions():
    found.setdefault(one.metadata["Name"], one.version)
print(json.dumps(found))
"""
"""Program that prints versions by package; the first of equal names is the one that is imported."""


@dataclass(frozen=True)
class PythonEnvironment:
    """Virtual environment of a command, and the versions that it must have."""

    name: str
    folder: str
    requirements: str
    """Path of the file of requirements from which it is made."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Versions by canonical name of the package."""

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return Path(self.folder) / "bin" / "python"

    @property
    def creation(self) -> str:
        """Command of a shell that makes the environment."""
        venv = shlex.join([sys.executable, "-m", "venv", self.folder])
        return f"{venv} && {shlex.join([str(self.python), '-m', 'pip', 'install', '-r', self.requirements])}"

    def check(self) -> dict[str, str]:
        """Return the versions of Python and of all packages of the environment, by name.

        Raises:
            WanmaError: the environment is missing or damaged, or a version is not the pinned one.
        """
        if not self.python.exists():
            raise WanmaError(
                f"the environment '{self.name}' is missing: there is no {self.python}",
                f"make it: {self.creation}\nor name the folder of your environments: --environments DIR, or "
                f"{FOLDER_VARIABLE}",
                EXIT_USAGE,
            )
        found = self._list_packages()
        versions = {canonical(name): version for name, version in found.items()}
        wrong = [
            f"{name} {versions[name]} instead of {pin}" if name in versions else f"{name} {pin} is missing"
            for name, pin in self.pins.items()
            if name not in versions or not _is_pinned(versions[name], pin)
        ]
        if wrong:
            raise WanmaError(
                f"the environment '{self.name}' in {self.folder} is not that of {self.requirements}: "
                f"{', '.join(wrong)}",
                f"make it again: rm -r {shlex.quote(self.folder)} && {self.creation}",
                EXIT_USAGE,
            )
        return found

    def _list_packages(self) -> dict[str, str]:
        try:
            listed = subprocess.run(
                [str(self.python), "-I", "-c", _LIST_PROGRAM],
                capture_output=True,
                text=True,
                check=True,
                timeout=LIST_SECONDS,
            )
            return dict(json.loads(listed.stdout))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            output = (getattr(error, "stderr", "") or "").strip()
            raise WanmaError(
                f"the environment '{self.name}' in {self.folder} does not work: {output or error}",
                f"make it again: rm -r {shlex.quote(self.folder)} && {self.creation}",
                EXIT_USAGE,
            ) from error


def read_pins(requirements: Path) -> dict[str, str]:
    """Return the versions of a file of requirements, by canonical name of the package.

    Raises:
        WanmaError: the file cannot be read, or a line is no `name==version`.
    """
    try:
        lines = requirements.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WanmaError(
            f"{requirements} cannot be read: {error.strerror}",
            "write the pins of the environment there, as `name==version`, or correct python_environment",
            EXIT_USAGE,
        ) from error
    pins = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text or text.startswith("--hash="):
            continue
        if (match := _PIN.fullmatch(text)) is None:
            raise WanmaError(
                f"{requirements}:{number}: '{text}' pins no version",
                "write name==version; `pip freeze` does",
                EXIT_USAGE,
            )
        pins[canonical(match[1])] = match[2]
    return pins


def environments_folder(given: Path | None = None) -> Path:
    """Return the folder of the environments: the given one, or that of the variable, or the default."""
    return given or Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def program_variables(
    environment: PythonEnvironment | None, own: Mapping[str, str], inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables of a program.

    In an environment of its own it finds no modules of the caller: the variables are those of `activate`.
    Else a PYTHONPATH of the contender comes before that of the caller.
    """
    if environment is not None:
        kept = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
        path = os.pathsep.join((str(environment.python.parent), inherited.get("PATH", os.defpath)))
        return {**kept, "PATH": path, "VIRTUAL_ENV": environment.folder, "PYTHONNOUSERSITE": "1", **own}
    paths = [one["PYTHONPATH"] for one in (own, inherited) if one.get("PYTHONPATH")]
    joined = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**inherited, **own, **joined}


def _is_pinned(version: str, pin: str) -> bool:
    """Return True if a version is the pinned one; 2.13.0+cpu is a build of 2.13.0 (PEP 440)."""
    return version == pin or ("+" not in pin and version.partition("+")[0] == pin)
