"""Archive of an environment: the lock file, the packages beside it, and this wanma as a wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wanma
from wanma.engines.environment.install import SETTINGS
from wanma.engines.environment.lock_file import LockFile, read_lock
from wanma.job.errors import WanmaError
from wanma.job.sections.cluster import ClusterSection

PREFIX = "environment-"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class EnvironmentArchive:
    """Sources of an environment: lock file, packages beside it, wanma."""

    digest: str
    """SHA-256 of the archive, in hexadecimal."""
    data: bytes
    title: str
    """Name of the lock file."""
    packages: int
    """Number of packages of the lock file."""
    variables: tuple[str, ...]
    """Environment variables that pip needs."""

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.digest}.tar"

    def values(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that are set here."""
        return {name: environment[name] for name in self.variables if name in environment}


def make_archive(section: ClusterSection, folder: Path) -> EnvironmentArchive | None:
    """Return the archive of a job's environment; equal files give equal bytes. None: the job has none.

    Args:
        section: settings of the cluster.
        folder: folder in which a relative path of the lock file starts.

    Raises:
        JobError: the lock file cannot be used.
    """
    if section.environment is None:
        return None
    lock = read_lock(section.environment, folder)
    files = {f"lock/{name}": data for name, data in lock.files.items()}
    wheel = ""
    if "wanma" not in lock.packages:
        name, data = make_wheel()
        wheel = f"wheel/{name}"
        files[wheel] = data
    return _pack(lock, files, wheel, section.system_site_packages)


def _pack(lock: LockFile, files: dict[str, bytes], wheel: str, is_added: bool) -> EnvironmentArchive:
    settings: dict[str, Any] = {
        "title": Path(lock.title).name,
        "lock": f"lock/{lock.name}",
        "wheel": wheel,
        "packages": len(lock.packages),
        "variables": sorted(lock.variables),
        "system_site_packages": is_added,
    }
    files = {**files, SETTINGS: json.dumps(settings).encode()}
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o600
            tar.addfile(member, io.BytesIO(data))
    data = output.getvalue()
    return EnvironmentArchive(
        hashlib.sha256(data).hexdigest(),
        data,
        settings["title"],
        len(lock.packages),
        tuple(sorted(lock.variables)),
    )


def save_archive(archive: EnvironmentArchive, folder: Path) -> Path:
    """Write the archive into the folder of a run's code; that of an earlier start of the run goes.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    path = folder / archive.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            partial = path.with_suffix(f".{os.getpid()}.partial")
            partial.write_bytes(archive.data)
            partial.replace(path)
        for other in folder.glob(f"{PREFIX}*.tar"):
            if other != path:
                other.unlink(missing_ok=True)
    except OSError as error:
        raise WanmaError(
            f"cannot write {path}: {error.strerror}", "free space there, or choose another --run-dir"
        ) from error
    return path


def load_archive(path: Path) -> EnvironmentArchive:
    """Read the archive of a run.

    Raises:
        WanmaError: it is gone or damaged.
    """
    try:
        data = path.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            member = tar.extractfile(SETTINGS)
            assert member is not None
            settings = json.load(member)
    except (OSError, KeyError, ValueError, tarfile.TarError) as error:
        raise WanmaError(
            f"the environment of the run cannot be read from {path}: {error}", "start the run again"
        ) from error
    digest = hashlib.sha256(data).hexdigest()
    return EnvironmentArchive(
        digest, data, settings["title"], settings["packages"], tuple(settings["variables"])
    )


def make_wheel() -> tuple[str, bytes]:
    """Return name and content of a wheel of this wanma, also of an editable one; equal files, equal bytes."""
    distribution = importlib.metadata.distribution("wanma")
    root = Path(wanma.__file__).parent
    files = {
        f"wanma/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"wanma-{distribution.version}.dist-info"
    # An .egg-info folder beside the sources, which a PYTHONPATH finds first, calls it PKG-INFO.
    metadata = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO")
    assert metadata is not None
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: wanma\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nwanma = wanma.cli.main:main\n"
    files[f"{info}/RECORD"] = _record(files.items(), f"{info}/RECORD")
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"wanma-{distribution.version}-py3-none-any.whl", output.getvalue()


def _record(files: Iterable[tuple[str, bytes]], name: str) -> bytes:
    lines = []
    for path, data in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{name},,\n"]).encode()
