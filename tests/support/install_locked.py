"""Installation of pinned packages, each file checked by its hash, and renewal of the lock file's hashes.

    python tests/support/install_locked.py .venv/bin/python core dev   # lists of pyproject.toml
    python tests/support/install_locked.py --renew                     # after a change of a pin

constraints.txt pins every package. The hashes of its files follow as comments, so that the file remains one
of plain constraints: pip accepts hashes only where all requirements are pinned. pip first resolves without
installing, then installs exactly that with --require-hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
LOCK = PROJECT.with_name("constraints.txt")


@dataclass(frozen=True)
class Pin:
    """Pinned package with the hashes of its files."""

    version: str
    hashes: tuple[str, ...]


def install(python: str, requirements: Sequence[str], pip_arguments: Sequence[str] = ()) -> None:
    """Install requirements and all that they need for the interpreter `python`.

    Raises:
        SystemExit: pip fails, or the lock has no hash of a package.
    """
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    options = ["--quiet", "--quiet", *pip_arguments]
    with tempfile.TemporaryDirectory() as folder:
        report, locked = Path(folder, "report.json"), Path(folder, "locked.txt")
        resolve = ["--dry-run", "--report", str(report), "--constraint", str(LOCK), *requirements]
        _run([*pip, *options, *resolve])
        chosen = json.loads(report.read_text())["install"]
        if not chosen:
            return
        locked.write_text(hashed_requirements(chosen, read_lock(LOCK.read_text())))
        _run([*pip, *options, "--no-deps", "--require-hashes", "--requirement", str(locked)])


def project_requirements(groups: Iterable[str]) -> list[str]:
    """Return the requirements of pyproject.toml in `groups`: "core", "build", or names of extras."""
    content = tomllib.loads(PROJECT.read_text())
    lists = {
        "core": content["project"]["dependencies"],
        "build": content["build-system"]["requires"],
        **content["project"]["optional-dependencies"],
    }
    return [requirement for group in groups for requirement in lists[group]]


def hashed_requirements(chosen: Iterable[Mapping[str, Any]], lock: Mapping[str, Pin]) -> str:
    """Return pip's requirements with hashes of the chosen packages.

    A local build, such as 2.13.0+cpu, is not on PyPI: its file is taken as its index has it, with a line.

    Args:
        chosen: entries of `install` in pip's report.
        lock: pins by canonical name.

    Raises:
        SystemExit: the lock has no hash of a package.
    """
    lines, missing = [], []
    for entry in chosen:
        name, version = entry["metadata"]["name"], entry["metadata"]["version"]
        hashes = lock.get(canonical(name), Pin("", ())).hashes
        if "+" in version:
            source = entry["download_info"]
            hashes = (archive_hash(source),)
            host = (
                urlsplit(source["url"]).hostname or "a folder of this machine"
            )  # the whole may have a password
            print(f"{name} {version} is a local build, without a hash in {LOCK.name}: from {host}")
        if not hashes:
            missing.append(name)
        options = " ".join(f"--hash=sha256:{value}" for value in hashes)
        lines.append(f"{name}=={version} {options}\n")
    if missing:
        raise SystemExit(
            f"{LOCK.name} has no hash of {', '.join(sorted(missing))}: add `name==version`, then run\n"
            "    python tests/support/install_locked.py --renew"
        )
    return "".join(lines)


def read_lock(text: str) -> dict[str, Pin]:
    """Return the pins of a lock file by canonical name."""
    lock: dict[str, Pin] = {}
    name = ""
    for line in text.splitlines():
        if pin := re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line):
            name = canonical(pin[1])
            lock[name] = Pin(pin[2], ())
        elif name and (value := re.fullmatch(r"\s+# sha256:([0-9a-f]{64})", line)):
            lock[name] = Pin(lock[name].version, (*lock[name].hashes, value[1]))
    return lock


def write_lock(text: str, hashes: Mapping[str, Iterable[str]]) -> str:
    """Return the lock's text with other hashes, by canonical name; pins and other lines stay."""
    lines = []
    for line in text.splitlines():
        if re.fullmatch(r"\s+# sha256:[0-9a-f]{64}", line):
            continue
        lines.append(line)
        if pin := re.fullmatch(r"([A-Za-z0-9._-]+)==\S+", line):
            lines += [f"    # sha256:{value}" for value in hashes[canonical(pin[1])]]
    return "\n".join(lines) + "\n"


def renew() -> None:
    """Write the hashes of all files of the pinned versions, as the package index has them, into the lock.

    Raises:
        SystemExit: uv is not installed, or a version does not exist.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv reads the hashes of the package index: pip install uv")
    pins = [f"{name}=={pin.version}" for name, pin in read_lock(LOCK.read_text()).items()]
    command = [uv, "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-annotate", "--no-header"]
    ended = subprocess.run(
        [*command, "--python-version", "3.11.9"], input="\n".join(pins), text=True, capture_output=True
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    found: dict[str, list[str]] = {}
    name = ""
    for line in ended.stdout.splitlines():
        if pin := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = canonical(pin[1])
            found[name] = []
        elif value := re.search(r"--hash=sha256:([0-9a-f]{64})", line):
            found[name].append(value[1])
    LOCK.write_text(write_lock(LOCK.read_text(), found))


def archive_hash(source: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the file that pip has chosen; pip before 23.1 reports it otherwise.

    Args:
        source: `download_info` of pip's report.
    """
    info = source["archive_info"]
    if "hashes" in info:
        return str(info["hashes"]["sha256"])
    if "hash" in info:
        return str(info["hash"]).removeprefix("sha256=")
    return hashlib.sha256(Path(unquote(urlsplit(source["url"]).path)).read_bytes()).hexdigest()


def canonical(name: str) -> str:
    """Return a package's name as indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(command: Sequence[str]) -> None:
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["--renew"]:
        renew()
    else:
        install(sys.argv[1], project_requirements(sys.argv[2:]), shlex.split(os.environ.get("PIP_ARGS", "")))
