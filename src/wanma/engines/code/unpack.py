"""Unpacker of code snapshots: once for all processes of a node, verified against the digest.

The file imports only the standard library (Python 3.8 or newer) and no module of wanma, so that a node
without wanma runs it from standard input:

    python3 -I -S - ARCHIVE CACHE_FOLDER [-- COMMAND ...] < unpack.py

It prints the folder of the unpacked snapshot. With a command, it becomes that command instead, with the
folder in the environment variable WANMA_CODE; the snapshot counts as in use until the command ends. Exit
code 3: the cache lacks the snapshot and the archive does not exist.

    CACHE_FOLDER/
        DIGEST/          unpacked snapshot; it appears complete, by a rename
        DIGEST.lock      locked exclusively to unpack or remove it, shared while it is in use; its time is
                         that of the last use
        .DIGEST.*        snapshot that is being unpacked or removed
"""

# ruff: noqa: UP006, UP035  # also runs on Python 3.8

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator, List, NamedTuple, Tuple

KEPT_SNAPSHOTS = 10
"""Number of last used snapshots that stay in a cache folder; older ones stay while they are in use."""
LOCK_TIMEOUT_SECONDS = 600.0
"""Longest wait for another process that unpacks the same snapshot."""
ABANDONED_SECONDS = 3600.0
"""Age from which an unfinished folder that nobody has locked is removed."""
CHUNK_BYTES = 1 << 20
EXIT_NO_ARCHIVE = 3
CODE_VARIABLE = "WANMA_CODE"
"""Environment variable of a command: folder of the unpacked snapshot."""

FILE, EXECUTABLE, LINK = b"f", b"x", b"l"
"""Kinds of entries."""


class UnpackError(Exception):
    """Failure to unpack: a message with the cause and a hint with the way out, as `WanmaError` has them."""

    def __init__(self, message: str, hint: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


class Entry(NamedTuple):
    """File or symbolic link of a snapshot; entries sort by path."""

    path: bytes
    """Path relative to the folder, with `/`."""
    kind: bytes
    content: bytes
    """SHA-256 of the content, or of a link's target; 32 bytes."""


class UnpackedSnapshot:
    """Unpacked snapshot that is in use, and therefore not removed, until `close` or the end of the process.

    Args:
        path: folder of the code.
        lock: file descriptor with the shared lock.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    def close(self) -> None:
        """Give the lock back."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> UnpackedSnapshot:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def unpack(
    archive: Path,
    cache_folder: Path,
    keep: int = KEPT_SNAPSHOTS,
    timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> UnpackedSnapshot:
    """Return the snapshot of `archive` in `cache_folder`, unpacked by the first process that asks for it.

    Args:
        archive: DIGEST.tar; only read if the cache lacks the snapshot.
        cache_folder: folder of this user's snapshots, created if missing.
        keep: number of snapshots that stay, at least 1.

    Raises:
        UnpackError: the archive is missing, damaged or unsafe, or the cache folder is unusable or full.
    """
    digest = archive.stem
    if not is_digest(digest) or archive.suffix != ".tar":
        raise UnpackError(
            f"{archive} is not named as a code snapshot", "give DIGEST.tar as make_snapshot has written it"
        )
    deadline = time.monotonic() + timeout_seconds
    _create_cache(cache_folder)
    folder = cache_folder / digest
    lock_file = cache_folder / f"{digest}.lock"
    while True:
        lock = _lock(lock_file, fcntl.LOCK_SH, deadline)
        assert lock is not None  # nothing makes it needless
        if folder.is_dir():
            os.utime(lock_file)
            return UnpackedSnapshot(folder, lock)
        os.close(lock)
        # The process that unpacks it holds it in use from then on, perhaps until it has met this one.
        exclusive = _lock(lock_file, fcntl.LOCK_EX, deadline, folder.is_dir)
        if exclusive is None:
            continue
        try:
            if not folder.is_dir():
                try:
                    _unpack_into(archive, digest, cache_folder)
                except BaseException:
                    with contextlib.suppress(OSError):
                        lock_file.unlink()
                    raise
                os.utime(lock_file)
                _prune(cache_folder, max(keep, 1))
        finally:
            os.close(exclusive)


def is_digest(text: str) -> bool:
    """Return True for the 64 hexadecimal digits of a SHA-256."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def entries_digest(entries: Iterable[Entry]) -> str:
    """Return the digest of a snapshot: SHA-256, in hexadecimal, of its entries in order of their paths."""
    total = hashlib.sha256()
    for entry in sorted(entries):
        total.update(b"%s%d:%s%s" % (entry.kind, len(entry.path), entry.path, entry.content))
    return total.hexdigest()


def _create_cache(cache_folder: Path) -> None:
    """Create the cache folder; refuse one in which another user could exchange the code."""
    way_out = "choose another cache folder, on a disk of the node"
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = cache_folder.stat().st_uid
    except OSError as error:
        raise UnpackError(f"cannot create {cache_folder}: {error.strerror}", way_out) from error
    if owner != os.geteuid():
        raise UnpackError(
            f"the cache folder {cache_folder} belongs to user {owner}, who could change the code",
            way_out,
        )


def _lock(
    path: Path, operation: int, deadline: float, is_needless: Callable[[], bool] = lambda: False
) -> int | None:
    """Return a descriptor of the lock file with the lock, once it is free; None: it is needless by then."""
    while True:
        try:
            descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _disk_error(error, path.parent) from error
        try:
            while not _try_lock(descriptor, operation):
                if is_needless():
                    os.close(descriptor)
                    return None
                if time.monotonic() > deadline:
                    raise UnpackError(
                        f"another process has held {path} for too long, unpacking the same code snapshot",
                        "end that process (fuser -v names it), or choose another cache folder",
                    )
                time.sleep(0.02)
            if _is_same_file(descriptor, path):
                return descriptor
        except OSError as error:
            os.close(descriptor)
            raise UnpackError(
                f"files in {path.parent} cannot be locked: {error.strerror}",
                "choose a cache folder on a disk of the node",
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was removed between open and lock


def _try_lock(descriptor: int, operation: int) -> bool:
    """Lock and return True; False if another process holds a lock that conflicts."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
            return False
        raise
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _unpack_into(archive: Path, digest: str, cache_folder: Path) -> None:
    """Unpack beside the final folder, verify, and rename; the caller holds the exclusive lock."""
    try:
        file = archive.open("rb")
    except FileNotFoundError as error:
        raise UnpackError(
            f"there is no code snapshot {archive}",
            "copy the archive to this node, or submit the run again",
            EXIT_NO_ARCHIVE,
        ) from error
    except OSError as error:
        raise UnpackError(
            f"cannot read {archive}: {error.strerror}", "make the archive readable for this user"
        ) from error
    with file:
        try:
            partial = Path(tempfile.mkdtemp(prefix=f".{digest}.", dir=str(cache_folder)))
        except OSError as error:
            raise _disk_error(error, cache_folder) from error
        try:
            found = entries_digest(_extract(file, archive, partial))
            if found != digest:
                raise _damage(archive, f"the content has digest {found}")
            partial.rename(cache_folder / digest)
        except BaseException as error:
            shutil.rmtree(str(partial), ignore_errors=True)
            if isinstance(error, OSError):
                raise _disk_error(error, cache_folder) from error
            raise


def _extract(file: BinaryIO, archive: Path, folder: Path) -> List[Entry]:
    """Write the members of an archive below a new folder and return them as entries.

    The rules are stricter than tarfile's `data` filter, and hold for versions of Python without it: no member
    lies outside the folder or below a link, and no link leads outside, not even through another link. Links
    are made after all files, so that no file is written through one.
    """
    root = os.fsencode(str(folder))
    entries, links = [], []
    known_folders = {root}
    for member, path, kind in _members(file, archive):
        target = os.path.join(root, path)
        parent = os.path.dirname(target)
        try:
            if parent not in known_folders:
                os.makedirs(parent, exist_ok=True)
                known_folders.add(parent)
            if kind == LINK:
                links.append((path, member.linkname.encode("utf-8", "surrogateescape")))
            else:
                entries.append(Entry(path, kind, _extract_file(file, member, target, kind)))
        except (FileExistsError, NotADirectoryError, EOFError) as error:
            raise _damage(archive, f"{os.fsdecode(path)} is cut off or contradicts another member") from error
    for path, link_target in links:
        try:
            os.symlink(link_target, os.path.join(root, path))
        except FileExistsError as error:
            raise _damage(archive, f"two members are named {os.fsdecode(path)}") from error
        entries.append(Entry(path, LINK, hashlib.sha256(link_target).digest()))
    real_root = os.path.realpath(root)
    for path, link_target in links:
        if os.path.isabs(link_target) or not is_inside(os.path.join(root, path), real_root):
            raise UnpackError(
                f"{archive} has a link that leads outside: {os.fsdecode(path)} -> {os.fsdecode(link_target)}",
                "make the snapshot again; this archive was not written by wanma",
            )
    return entries


def is_inside(path: bytes, real_root: bytes) -> bool:
    """Return True if `path`, with all links followed, is the folder `real_root` or lies below it."""
    real = os.path.realpath(path)
    return real == real_root or real.startswith(real_root.rstrip(b"/") + b"/")


def _members(file: BinaryIO, archive: Path) -> Iterator[Tuple[tarfile.TarInfo, bytes, bytes]]:
    """Yield the members of an archive with their path and kind; all are checked before the first."""
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
            members = tar.getmembers()
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise _damage(archive, str(error)) from error
    checked = []
    for member in members:
        path = member.name.encode("utf-8", "surrogateescape")
        is_file = member.type == tarfile.REGTYPE
        if (
            not (is_file or member.type == tarfile.SYMTYPE)
            or not path
            or any(part in (b"", b".", b"..") for part in path.split(b"/"))
        ):
            raise UnpackError(
                f"{archive} has a member that is no file or link below its folder: {member.name!r}",
                "make the snapshot again; this archive was not written by wanma",
            )
        kind = LINK if not is_file else EXECUTABLE if member.mode & stat.S_IXUSR else FILE
        checked.append((member, path, kind))
    yield from checked


def _extract_file(file: BinaryIO, member: tarfile.TarInfo, target: bytes, kind: bytes) -> bytes:
    """Write one new file and return the SHA-256 of its content."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(target, flags, 0o777 if kind == EXECUTABLE else 0o666)
    content = hashlib.sha256()
    with open(descriptor, "wb", buffering=0) as output:
        file.seek(member.offset_data)
        left = member.size
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise EOFError
            content.update(chunk)
            view = memoryview(chunk)
            while view:  # an unbuffered write may be short
                view = view[output.write(view) :]
            left -= len(chunk)
    return content.digest()


def _damage(archive: Path, cause: str) -> UnpackError:
    return UnpackError(
        f"the code snapshot {archive} is damaged: {cause}",
        "copy the archive again, or remove it and submit again",
    )


def _disk_error(error: OSError, cache_folder: Path) -> UnpackError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UnpackError(
            f"no space for the code snapshot in {cache_folder}: {error.strerror}",
            "free space there, or choose another cache folder",
        )
    return UnpackError(
        f"cannot unpack the code snapshot in {cache_folder}: {error}",
        "choose another cache folder, on a disk of the node",
    )


def _prune(cache_folder: Path, keep: int) -> None:
    """Remove all snapshots but the `keep` last used and those in use, and what ended processes have left."""
    now = time.time()
    newest = sorted(((_mtime(path), path) for path in cache_folder.glob("*.lock")), reverse=True)
    snapshots = [path for _, path in newest if (cache_folder / path.stem).is_dir()]
    for lock_file in snapshots[keep:]:
        if is_digest(lock_file.stem):
            _remove_unused(cache_folder / lock_file.stem, lock_file)
    for leftover in cache_folder.glob(".*"):
        digest = leftover.name.split(".")[1]
        if is_digest(digest) and now - _mtime(leftover) > ABANDONED_SECONDS:
            _remove_unused(leftover, cache_folder / f"{digest}.lock")


def _remove_unused(folder: Path, lock_file: Path) -> None:
    """Remove a folder and, with a snapshot, its lock file; leave both where a process holds the lock."""
    try:
        descriptor = os.open(str(lock_file), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return
    try:
        if not _try_lock(descriptor, fcntl.LOCK_EX) or not _is_same_file(descriptor, lock_file):
            return
        doomed = folder
        if not folder.name.startswith("."):
            doomed = folder.with_name(f".{folder.name}.removed-{os.getpid()}")
            folder.rename(doomed)
        shutil.rmtree(str(doomed), ignore_errors=True)
        if not (lock_file.parent / lock_file.stem).is_dir():
            lock_file.unlink()
    except OSError:
        return  # another process removes it, too; the next snapshot tries again
    finally:
        os.close(descriptor)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def main(arguments: List[str]) -> int:
    """Run as a program; see the top of this file. Returns the exit code."""
    own, command = arguments, []
    if "--" in arguments:
        split = arguments.index("--")
        own, command = arguments[:split], arguments[split + 1 :]
    parser = argparse.ArgumentParser(prog="unpack", description="Unpack a code snapshot once on this node.")
    parser.add_argument("archive", type=Path)
    parser.add_argument("cache_folder", type=Path)
    parser.add_argument("--keep", type=int, default=KEPT_SNAPSHOTS)
    parser.add_argument("--timeout", type=float, default=LOCK_TIMEOUT_SECONDS, metavar="SECONDS")
    options = parser.parse_args(own)
    try:
        snapshot = unpack(
            options.archive.expanduser(), options.cache_folder.expanduser(), options.keep, options.timeout
        )
    except UnpackError as error:
        print(f"error: {error.message}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    folder = snapshot.path.absolute()
    if not command:
        sys.stdout.buffer.write(os.fsencode(str(folder)) + b"\n")
        return 0
    os.set_inheritable(snapshot.lock, True)  # the command holds the lock until it ends
    os.environ[CODE_VARIABLE] = str(folder)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
