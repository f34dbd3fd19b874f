"""Files of a folder that belong to its code snapshot.

In a working tree of git: the tracked files and the untracked ones that git does not ignore, with those of
submodules and of other repositories within it. Elsewhere: all files. Left out in both, unless tracked:
virtual environments, caches of tools, `node_modules`, results of benchmarks and the folder of the runs. Last,
`.wanmaignore` files leave out more, tracked files included, with git's own rules for `.gitignore`. Empty
folders are not listed, as in git.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from wanma.engines.code.git import NoRepositoryError, repository_root, run_git
from wanma.job.errors import WanmaError

WALK_TIMEOUT_SECONDS = 30.0
"""Longest listing of a folder outside git."""
IGNORE_FILE = ".wanmaignore"
_FOLDERS_WITHOUT_CODE = frozenset(
    name.encode()
    for name in (
        *(
            ".cache",
            ".eggs",
            ".hg",
            ".hypothesis",
            ".ipynb_checkpoints",
            ".mypy_cache",
            ".nox",
            ".pytest_cache",
        ),
        *(".pytype", ".ruff_cache", ".svn", ".tox", "__pycache__", "node_modules"),
    )
)
BENCHMARK_RESULTS_FILE = ".wanma-results"
"""Name in a folder of results of benchmarks, which change with every measurement."""
_MARKERS_WITHOUT_CODE = (b"pyvenv.cfg", b"conda-meta", b"CACHEDIR.TAG", BENCHMARK_RESULTS_FILE.encode())
"""Names in a folder that make it a virtual environment, a conda environment, a cache or results."""
_EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


@dataclass
class CodeListing:
    """Files of a code snapshot, before they are read."""

    files: dict[bytes, os.stat_result] = field(default_factory=dict)
    """Regular files and links by path relative to the folder; the status is that of the link itself."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""


def list_code(folder: Path, run_folder: Path) -> CodeListing:
    """List the files of `folder`; untracked ones in `run_folder` are left out.

    Raises:
        WanmaError: a file cannot be read or is none, git fails, or the listing takes too long.
    """
    is_left_out = _left_out_rule(folder, run_folder)
    listing = CodeListing()
    paths = set(_tree_paths(folder, b"", is_left_out, listing.notes))
    if any(os.path.basename(path) == IGNORE_FILE.encode() for path in paths):
        paths -= _ignored_paths(folder, paths)
    special, unreadable = [], []
    root = os.path.join(os.fsencode(folder), b"")
    for path in sorted(paths):
        full = root + path
        try:
            status = os.lstat(full)
        except FileNotFoundError:
            continue  # tracked, but deleted in the working tree
        except OSError:
            unreadable.append(path)
            continue
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            special.append(path)
        elif stat.S_ISREG(status.st_mode) and not os.access(full, os.R_OK):
            unreadable.append(path)
        else:
            listing.files[path] = status
    if special:
        raise WanmaError(
            f"the code in {folder} has sockets, pipes or devices: {named(special)}",
            f"remove them, or add them to .gitignore or {IGNORE_FILE}",
        )
    if unreadable:
        raise unreadable_error(folder, unreadable)
    return listing


def unreadable_error(folder: Path, paths: Iterable[bytes]) -> WanmaError:
    """Return the error for files and folders of the code that this user may not read."""
    return WanmaError(
        f"the code in {folder} cannot be read: {named(paths)}",
        f"make it readable with chmod, or add it to .gitignore or {IGNORE_FILE}",
    )


def named(paths: Iterable[bytes], most: int = 5) -> str:
    """Return the first names as text, with the number of the others."""
    names = [path.decode("utf-8", "backslashreplace") for path in sorted(paths)]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _left_out_rule(folder: Path, run_folder: Path) -> Callable[[bytes], bool]:
    """Return the function that is True for folders, as relative paths, without code and for those within."""
    root = os.path.realpath(os.fsencode(folder))
    runs = os.path.relpath(os.path.realpath(os.path.join(root, os.fsencode(run_folder))), root)

    @cache
    def is_left_out(path: bytes) -> bool:
        if not path:
            return False
        parent, name = os.path.split(path)
        return (
            is_left_out(parent)
            or name in _FOLDERS_WITHOUT_CODE
            or path == runs
            or any(os.path.lexists(os.path.join(root, path, marker)) for marker in _MARKERS_WITHOUT_CODE)
        )

    return is_left_out


def _tree_paths(
    folder: Path, base: bytes, is_left_out: Callable[[bytes], bool], notes: list[str]
) -> Iterator[bytes]:
    """Yield paths, relative to `folder`, of the files below `base`: by git if it lies in a working tree."""
    place = folder / os.fsdecode(base)
    try:
        repository_root(place)
        tracked, untracked = _git_paths(place)
    except NoRepositoryError:
        yield from _walk(folder, base, is_left_out)
        return
    root = os.path.join(os.fsencode(folder), b"")
    prefix = os.path.join(base, b"") if base else b""
    for path in sorted(tracked | untracked):
        full = prefix + path.rstrip(b"/")
        if path not in tracked and is_left_out(os.path.dirname(full)):
            continue
        nested = root + full
        if not os.path.isdir(nested) or os.path.islink(nested):
            yield full
        elif os.path.lexists(os.path.join(nested, b".git")):
            if path in tracked or not is_left_out(full):
                yield from _tree_paths(folder, full, is_left_out, notes)
        else:
            files = list(_walk(folder, full, is_left_out))
            if not files:
                notes.append(
                    f"submodule {os.fsdecode(full)} is empty and not sent; "
                    "`git submodule update --init` fetches it"
                )
            yield from files


def _git_paths(place: Path) -> tuple[set[bytes], set[bytes]]:
    """Return the tracked and the untracked paths, relative to `place`."""
    tracked = _split(run_git(place, "ls-files", "-c", "-z").text)
    if not tracked:
        ignored = run_git(place, "check-ignore", ".", accepted_exit_codes=(0, 1))
        if ignored.text:
            raise NoRepositoryError(f"the repository ignores {place}")  # as one of a whole home folder does
    output = run_git(place, "ls-files", "-o", "--exclude-standard", "-z")
    closed = [line for line in output.warnings.splitlines() if "could not open directory" in line]
    if closed:
        folders = [os.fsencode(line.partition("'")[2].rpartition("'")[0]) for line in closed]
        raise unreadable_error(place, folders)
    return tracked, _split(output.text)


def _walk(folder: Path, base: bytes, is_left_out: Callable[[bytes], bool]) -> Iterator[bytes]:
    """Yield paths, relative to `folder`, of all files below `base`, without following links."""
    deadline = time.monotonic() + WALK_TIMEOUT_SECONDS
    root = os.fsencode(folder)
    waiting = [base]
    while waiting:
        if time.monotonic() > deadline:
            raise WanmaError(
                f"listing the code in {folder} took longer than {WALK_TIMEOUT_SECONDS:.0f} s",
                "give the folder of the code alone; data belongs at a path that all nodes see",
            )
        below = waiting.pop()
        try:
            children = list(os.scandir(os.path.join(root, below)))
        except OSError as error:
            raise unreadable_error(folder, [below or b"."]) from error
        for child in children:
            if child.name == b".git":  # a folder, or the file of a submodule
                continue
            path = os.path.join(below, child.name)
            if not child.is_dir(follow_symlinks=False):
                yield path
            elif not is_left_out(path):
                waiting.append(path)


def _ignored_paths(folder: Path, paths: Iterable[bytes]) -> set[bytes]:
    """Return the paths that the `.wanmaignore` files of the folder leave out.

    An empty repository beside the folder tracks the paths, so that git applies its own rules to exactly them.
    """
    if shutil.which("git") is None:
        raise WanmaError(
            f"{folder} has a {IGNORE_FILE}, and only git can apply its rules",
            f"install git, or remove {IGNORE_FILE}",
        )
    index = b"".join(b"100644 %s\t%s\0" % (_EMPTY_BLOB.encode(), path) for path in paths)
    with TemporaryDirectory(prefix="wanma-") as place:
        repository = Path(place) / "repository"
        run_git(Path(place), "init", "-q", "--bare", "--template=", str(repository))
        here = (f"--git-dir={repository}", f"--work-tree={folder.absolute()}")
        run_git(folder, *here, "update-index", "-z", "--index-info", stdin=index)
        output = run_git(
            folder, *here, "ls-files", "-c", "-i", "-z", f"--exclude-per-directory={IGNORE_FILE}"
        )
    return _split(output.text)


def _split(names: bytes) -> set[bytes]:
    return set(names.split(b"\0")) - {b""}
