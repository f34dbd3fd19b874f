"""Lock files: requirements of pip, `pylock.toml` and `uv.lock`, all as requirements of pip."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from wanma.engines.environment.pylock import pylock_requirements
from wanma.job.errors import JobError
from wanma.job.url_credentials import has_secret

KEY = "cluster.environment"
UV_SECONDS = 120.0
MOST_BYTES = 256 << 20
"""Most bytes of the lock file's own packages, which are sent to each host."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*===?\s*[^\s;*,]+(?:\s*;.*|\s*)")
_DIRECT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*@\s*(\S+)(?:\s+;.*)?")
_INCLUDE = re.compile(r"(?:-r|-c|--requirement|--constraint)(?:\s*=\s*|\s+|(?<=-[rc]))(\S.*)")
_FIND_LINKS = re.compile(r"(?:-f|--find-links)(?:\s*=\s*|\s+|(?<=-f))(\S.*)")
_OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|--no-index|--require-hashes|--no-binary|--only-binary|"
    r"--prefer-binary|--pre|--trusted-host|--use-feature)(?:[\s=].*)?"
)
_PACKAGE_FILES = (".whl", ".tar.gz", ".zip")
_AUTHORITY = re.compile(r"\w://([^/\s'\"@]*)@")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")


@dataclass
class LockFile:
    """Requirements with fixed content."""

    name: str
    """Name of the file for pip, a key of `files`."""
    title: str
    """Path as the user gave it, for messages."""
    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents by path, relative to the folder of the lock file: it, what it includes, packages beside it."""
    packages: list[str] = field(default_factory=list)
    """Canonical names of the packages; those that markers leave out count, too."""
    variables: set[str] = field(default_factory=set)
    """Environment variables that the lines take, as ${NAME}."""


def read_lock(text: str, folder: Path) -> LockFile:
    """Read a lock file and all that it needs.

    Args:
        text: `cluster.environment`.
        folder: folder in which a relative path starts.

    Raises:
        JobError: it cannot be read, has a line without fixed content, or a password.
    """
    path = folder / Path(text).expanduser()
    if path.name == "uv.lock":
        requirements = pylock_requirements(_export_uv(path), text)
    elif re.fullmatch(r"pylock(\.[^.]+)?\.toml", path.name):
        requirements = pylock_requirements(_read(path, text).decode("utf-8", "replace"), text)
    else:
        lock = LockFile(path.name, text, path.parent)
        _add(lock, path, path.name)
        return _checked(lock)
    lock = LockFile("requirements.txt", text, path.parent, {"requirements.txt": requirements.encode()})
    for place, line in _lines(requirements, text):
        _read_line(lock, path.parent, line, place)
    return _checked(lock)


def _checked(lock: LockFile) -> LockFile:
    if not lock.packages:
        raise JobError(
            f"{KEY} = '{lock.title}' names no package",
            "write one with `pip freeze`, `uv pip compile` or `uv lock`",
        )
    if (size := sum(map(len, lock.files.values()))) > MOST_BYTES:
        raise JobError(
            f"{KEY} = '{lock.title}': the packages beside it have {size >> 20} MiB, and {MOST_BYTES >> 20} "
            "are sent to a host at most",
            "put large packages on an index, or into a folder that hosts see: --find-links /shared/wheels",
        )
    return lock


def _add(lock: LockFile, path: Path, name: str) -> None:
    """Add a file of requirements and those that it includes."""
    if name in lock.files:
        return
    lock.files[name] = _read(path, lock.title if name == lock.name else name)
    for place, line in _lines(lock.files[name].decode("utf-8", "replace"), name):
        _read_line(lock, path.parent, line, place, str(PurePosixPath(name).parent))


def _read_line(lock: LockFile, folder: Path, line: str, place: str, prefix: str = ".") -> None:
    """Read one line of requirements.

    Args:
        lock: receives what the line needs.
        folder: folder of the line's file.
        line: the line, without comment.
        place: file and line, for messages.
        prefix: folder of the line's file, relative to that of the lock file.
    """
    names = [_VARIABLE.sub("", name).strip(":") for name in _AUTHORITY.findall(line)]
    if set(names) - {"", "git"} or has_secret(_AUTHORITY.sub("x://", line)):
        raise JobError(
            f"{place}: the URL has a name or password, which copies of the file would show",
            "write ${NAME}, which pip takes from the environment, or use ~/.netrc or pip's configuration",
        )
    lock.variables.update(_VARIABLE.findall(line))
    if match := _INCLUDE.fullmatch(line):
        name = _inside(prefix, match[1].strip(), place)
        _add(lock, folder / match[1].strip(), name)
        return
    if match := _FIND_LINKS.fullmatch(line):
        _add_folder(lock, folder, match[1].strip(), place, prefix)
        return
    if _OPTION.fullmatch(line):
        return
    requirement, *hashes = re.split(r"\s+--hash[=\s]", line)
    if (match := _PIN.fullmatch(requirement)) or (
        (match := _DIRECT.fullmatch(requirement)) and _is_fixed(match[2], bool(hashes))
    ):
        lock.packages.append(canonical(match[1]))
    elif "://" not in requirement and requirement.partition(" ;")[0].endswith(_PACKAGE_FILES):
        path = requirement.partition(" ;")[0].strip()
        if not Path(path).is_absolute():
            lock.files[_inside(".", path, place)] = _read(lock.folder / path, path)  # as pip looks for it
        lock.packages.append(canonical(re.split(r"-\d", Path(path).name)[0]))
    else:
        raise JobError(
            f"{place}: '{line}' has no fixed content: an environment is made once from equal lines",
            "pin each package, as name==1.2.3: `pip freeze` and `uv pip compile` write such files",
        )


def canonical(name: str) -> str:
    """Return a package's name as indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_fixed(url: str, has_hash: bool) -> bool:
    """Return True if the content of a URL never changes."""
    if url.startswith(("git+", "hg+")):
        return re.search(r"@[0-9a-f]{40}(?:#|$)", url) is not None
    return has_hash or "#sha256=" in url or url.partition("#")[0].endswith(".whl")


def _add_folder(lock: LockFile, folder: Path, link: str, place: str, prefix: str) -> None:
    """Add the packages of a folder of `--find-links`; a URL or an absolute path is the host's own."""
    if "://" in link or Path(link).is_absolute():
        return
    name = _inside(prefix, link, place)
    if not (folder / link).is_dir():
        raise JobError(f"{place}: there is no folder {folder / link}", "correct the path of --find-links")
    for path in sorted((folder / link).iterdir()):
        if path.name.endswith(_PACKAGE_FILES):
            lock.files[f"{name}/{path.name}"] = _read(path, path.name)


def _inside(prefix: str, link: str, place: str) -> str:
    """Return a path relative to the folder of the lock file; refuse one outside."""
    parts: list[str] = []
    for part in (PurePosixPath(prefix) / link).parts:
        if part == ".." and parts:
            parts.pop()
        else:
            parts.append(part)
    if Path(link).is_absolute() or ".." in parts:
        raise JobError(
            f"{place}: {link} lies outside the folder of the lock file", "move it into that folder"
        )
    return "/".join(parts)


def _lines(text: str, title: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each line; lines that end in a backslash go on."""
    start, joined = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        start = start or number
        joined += re.sub(r"(^|\s+)#.*$", "", raw)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield f"{title}, line {start}", joined.strip()
        start, joined = 0, ""


def _read(path: Path, title: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(
            f"{KEY}: '{title}' cannot be read: {error.strerror}",
            "give the path of a lock file: requirements.txt, pylock.toml or uv.lock",
        ) from error


def _export_uv(path: Path) -> str:
    """Return a `uv.lock` as the text of a `pylock.toml`, without the project itself."""
    _read(path, path.name)
    if (uv := shutil.which("uv")) is None:
        raise JobError(f"{KEY} = '{path}': it is read by uv, which is not installed here", "pip install uv")
    command = [
        uv,
        "export",
        "--frozen",
        "--no-emit-project",
        "--no-dev",
        "--no-header",
        "--format",
        "pylock.toml",
    ]
    done = subprocess.run(
        [*command, "--project", str(path.parent)],
        capture_output=True,
        text=True,
        timeout=UV_SECONDS,
        check=False,
    )
    if done.returncode:
        raise JobError(
            f"{KEY} = '{path}': uv cannot read it: {' '.join(done.stderr.split())}",
            "`uv lock` writes it anew",
        )
    return done.stdout
