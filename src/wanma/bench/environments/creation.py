"""Creation of the Python environments of a suite: what its user has asked for, and nothing else.

pip first resolves without installing, then installs exactly that, each file checked by the hash of its pin.
Pins without hashes are installed as they are listed, without what they depend on: a list may leave some out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from wanma.bench.environments.pinned_packages import Pin, read_pins
from wanma.bench.environments.python_environment import PythonEnvironment
from wanma.engines.environment.install import pip_variables
from wanma.engines.environment.lock_file import canonical
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.observe.units import count_text

READY, MISSING = "ready", "missing"


def environment_state(environment: PythonEnvironment) -> str:
    """Return the state of an environment: ready, missing, or a sentence about what is wrong with it."""
    if not os.path.lexists(environment.folder):
        return MISSING
    try:
        environment.check()
    except WanmaError as error:
        return error.message
    return READY


def make_environment(environment: PythonEnvironment, progress: Callable[[str], None]) -> None:
    """Make an environment that is missing; its folder is new, and goes if it cannot be made.

    Args:
        environment: environment of this machine.
        progress: receives lines about what is done.

    Raises:
        WanmaError: there is something in its folder; or pip fails, or would install what has no pin.
    """
    folder = Path(environment.folder)
    if os.path.lexists(folder):
        raise WanmaError(
            f"{folder} exists, and is not the environment '{environment.name}' of {environment.requirements}",
            f"remove {folder}, or name another folder: --environments DIR",
            EXIT_USAGE,
        )
    pins = read_pins(Path(environment.requirements))
    progress(f"{environment.name}: making {folder}, {count_text(len(environment.pins), 'pinned package')}")
    try:
        _run([sys.executable, "-m", "venv", str(folder)], "the virtual environment cannot be made")
        _install(environment, pins, progress)
        environment.check()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _install(
    environment: PythonEnvironment,
    pins: Mapping[str, Pin],
    progress: Callable[[str], None],
) -> None:
    pip = [str(environment.python), "-I", "-m", "pip", "--disable-pip-version-check", "--no-input"]
    install = [*pip, "install", "--quiet"]
    with tempfile.TemporaryDirectory() as temporary:
        required, allowed, report, locked = (
            Path(temporary, name) for name in ("required.txt", "allowed.txt", "report.json", "locked.txt")
        )
        lines = {name: f"{name}=={pin.version}\n" for name, pin in pins.items()}
        required.write_text("".join(lines[name] for name in environment.pins))
        allowed.write_text("".join(lines.values()))
        wanted = ["--requirement", str(required), "--constraint", str(allowed)]
        problem = f"pip cannot install the pins of {environment.requirements}"
        if not any(pin.hashes for pin in pins.values()):
            progress(
                f"{environment.name}: its pins have no hashes; pip takes these, and no others, of its index"
            )
            _run([*install, "--no-deps", *wanted], problem)
            return
        _run([*install, "--dry-run", "--report", str(report), *wanted], problem)
        chosen = json.loads(report.read_text())["install"]
        locked.write_text(hashed_requirements(chosen, pins, environment.requirements, progress))
        _run([*install, "--no-deps", "--require-hashes", "--requirement", str(locked)], problem)


def hashed_requirements(
    chosen: Iterable[Mapping[str, Any]],
    pins: Mapping[str, Pin],
    requirements: str,
    progress: Callable[[str], None],
) -> str:
    """Return requirements with hashes of the packages that pip has chosen.

    A local build, such as 2.13.0+cpu, has no hash among the pins: its file is taken as its index has it, with
    a line.

    Args:
        chosen: entries of `install` in pip's report.
        pins: pins by canonical name.
        requirements: file of the pins, for messages.
        progress: receives a line for each local build.

    Raises:
        WanmaError: a package has no pin, or no hash.
    """
    lines, missing = [], []
    for entry in chosen:
        name, version = canonical(entry["metadata"]["name"]), entry["metadata"]["version"]
        pin = pins.get(name, Pin(version))
        if "+" in version and name in pins:
            source = entry["download_info"]
            host = urlsplit(source["url"]).hostname or "a folder of this machine"  # without a password
            progress(f"{name} {version} is a local build, without a hash in the pins: from {host}")
            pin = Pin(version, (_archive_hash(source),))
        if not pin.hashes:
            missing.append(f"{name} {version}")
        lines.append(f"{pin.requirement(name)}\n")
    if missing:
        raise WanmaError(
            f"{requirements} has no pin with a hash of {', '.join(sorted(missing))}, which pip would install",
            "add them to the pins, or give pip an index with builds that do not need them",
            EXIT_USAGE,
        )
    return "".join(lines)


def _archive_hash(source: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the file that pip has chosen.

    Args:
        source: `download_info` of pip's report, which has no hash for a file of this machine.
    """
    hashes = source.get("archive_info", {}).get("hashes", {})
    if "sha256" in hashes:
        return str(hashes["sha256"])
    return hashlib.sha256(Path(unquote(urlsplit(source["url"]).path)).read_bytes()).hexdigest()


def _run(command: Sequence[str], problem: str) -> None:
    """Run a program, whose output the user sees.

    Raises:
        WanmaError: it fails.
    """
    code = subprocess.run(command, env=pip_variables(os.environ), stdin=subprocess.DEVNULL, check=False)
    if code.returncode:
        raise WanmaError(
            f"{problem}: exit code {code.returncode}, the reason stands above",
            "give pip an index that has them: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS",
        )
