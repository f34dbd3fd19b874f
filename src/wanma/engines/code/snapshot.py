"""Code snapshot: the files of a folder as one archive, named by the digest of its content.

Equal files give an equal archive, byte for byte, wherever and whenever it is made, and one that exists is not
written again. `unpack.py` is the counterpart on the nodes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from wanma.engines.code.listing import IGNORE_FILE, CodeListing, list_code, named, unreadable_error
from wanma.engines.code.secret_names import is_secret_name
from wanma.engines.code.size_limit import check_size
from wanma.engines.code.unpack import (
    CHUNK_BYTES,
    EXECUTABLE,
    FILE,
    LINK,
    Entry,
    entries_digest,
    is_inside,
)
from wanma.job.errors import WanmaError

MOST_BYTES = 256 << 20
MOST_FILES = 50_000
_ATTEMPTS = 3
"""Attempts while files change."""
_ARCHIVE_NAME = re.compile(rb"[0-9a-f]{64}\.tar|\.snapshot-[^/]*\.partial")


@dataclass(frozen=True)
class CodeSnapshot:
    """Archive of the user's code."""

    digest: str
    """SHA-256, in hexadecimal, over paths, executable bits and contents."""
    path: Path
    """The archive, DIGEST.tar."""
    files: int
    """Number of files and links."""
    bytes: int
    """Size of the contents."""
    notes: tuple[str, ...] = ()
    """Sentences for the user: files that look like credentials, links without a target, empty submodules."""


def make_snapshot(
    folder: Path,
    destination: Path,
    *,
    most_bytes: int = MOST_BYTES,
    most_files: int = MOST_FILES,
    run_folder: Path = Path("runs"),
) -> CodeSnapshot:
    """Write the files of `folder` (see `listing`) to `destination`/DIGEST.tar, unless it exists.

    Archives that an earlier call has left within `folder` are left out.

    Args:
        most_bytes: largest size of all contents.
        most_files: largest number of files and links.
        run_folder: folder of run directories, relative to `folder`; only tracked files of it are sent.

    Raises:
        WanmaError: too large; a file is unreadable, special, or a link that leads outside; git fails;
            the destination cannot be written.
    """
    if not folder.is_dir():
        raise WanmaError(
            f"there is no folder {folder} with code", "give the folder that holds the code of the run"
        )
    for _ in range(_ATTEMPTS):
        try:
            return _make_snapshot(folder, destination, most_bytes, most_files, run_folder)
        except _ChangedError as error:
            changed = error.path
    raise WanmaError(
        f"{named([changed])} in {folder} changes while the code is read",
        f"let the program that writes it end, or add it to .gitignore or {IGNORE_FILE}",
    )


class _ChangedError(Exception):
    """Change of a file between its listing and the end of its reading."""

    def __init__(self, path: bytes) -> None:
        super().__init__(path)
        self.path = path


def _make_snapshot(
    folder: Path, destination: Path, most_bytes: int, most_files: int, run_folder: Path
) -> CodeSnapshot:
    listing = list_code(folder, run_folder)
    _leave_out_archives(listing, folder, destination)
    if not listing.files:
        raise WanmaError(
            f"{folder} has no files for a code snapshot",
            f"give the folder that holds the code, or correct .gitignore and {IGNORE_FILE}",
        )
    check_size(folder, listing, most_bytes, most_files)
    root = os.path.join(os.fsencode(folder), b"")
    links = _link_targets(folder, listing)
    digest = ""
    if any(destination.glob("*.tar")):  # one of them may be this one; otherwise the writer hashes the files
        entries = [
            Entry(path, LINK, hashlib.sha256(links[path]).digest())
            if path in links
            else Entry(path, _kind(status), _hash_file(root, path, status, lambda _chunk: None))
            for path, status in listing.files.items()
        ]
        digest = entries_digest(entries)
    if not digest or not (destination / f"{digest}.tar").is_file():
        digest = _write_archive(root, listing, links, destination)
    sizes = sum(
        len(links[path]) if path in links else status.st_size for path, status in listing.files.items()
    )
    notes = (*listing.notes, *_notes(listing, links))
    return CodeSnapshot(digest, destination / f"{digest}.tar", len(listing.files), sizes, notes)


def _leave_out_archives(listing: CodeListing, folder: Path, destination: Path) -> None:
    """Remove the archives of earlier snapshots from a listing."""
    root = os.path.realpath(os.fsencode(folder))
    archives = os.path.relpath(os.path.realpath(os.fsencode(destination)), root)
    for path in list(listing.files):
        parent, name = os.path.split(path)
        if (parent or b".") == archives and _ARCHIVE_NAME.fullmatch(name):
            del listing.files[path]


def _kind(status: os.stat_result) -> bytes:
    return EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE


def _link_targets(folder: Path, listing: CodeListing) -> dict[bytes, bytes]:
    """Return the targets of all links, made relative; refuse links that lead outside."""
    root = os.fsencode(folder)
    real_root = os.path.realpath(root)
    targets, outside = {}, []
    for path, status in listing.files.items():
        if not stat.S_ISLNK(status.st_mode):
            continue
        full = os.path.join(root, path)
        try:
            target = os.readlink(full)
        except OSError as error:
            raise _ChangedError(path) from error
        if not is_inside(full, real_root):
            outside.append(path)
        elif os.path.isabs(target):
            target = os.path.relpath(os.path.realpath(full), os.path.realpath(os.path.dirname(full)))
        targets[path] = target
    if outside:
        raise WanmaError(
            f"links in {folder} lead outside it: {named(outside)}",
            f"copy what they point to, or ignore the links in .gitignore or {IGNORE_FILE}",
        )
    return targets


def _notes(listing: CodeListing, links: dict[bytes, bytes]) -> Iterator[str]:
    """Yield sentences on files that a user may not want to send, or may miss."""
    if secrets := [path for path in listing.files if is_secret_name(os.fsdecode(path))]:
        yield (
            f"the code snapshot has files that look like credentials: {named(secrets)}; "
            f"add them to .gitignore or {IGNORE_FILE} unless the nodes need them"
        )
    known = set(listing.files)
    for path in listing.files:
        while (path := os.path.dirname(path)) and path not in known:
            known.add(path)
    broken = []
    for path, target in links.items():
        place = os.path.normpath(os.path.join(os.path.dirname(path), target))
        if place != b"." and place not in known:
            broken.append(path)
    if broken:
        yield f"the code snapshot lacks the targets of these links: {named(broken)}"


def _hash_file(root: bytes, path: bytes, listed: os.stat_result, consume: Callable[[bytes], object]) -> bytes:
    """Give a file's content to `consume` and return its SHA-256; `root` ends in `/`."""
    full = root + path
    try:
        descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise unreadable_error(Path(os.fsdecode(root)), [path]) from error
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise _ChangedError(path) from error
        raise _read_error(path, error) from error
    content, size = hashlib.sha256(), 0
    try:
        while chunk := _read(descriptor, path):
            size += len(chunk)
            if size > listed.st_size:
                break
            content.update(chunk)
            consume(chunk)
    finally:
        os.close(descriptor)
    if size != listed.st_size:
        raise _ChangedError(path)
    return content.digest()


def _read(descriptor: int, path: bytes) -> bytes:
    try:
        return os.read(descriptor, CHUNK_BYTES)
    except OSError as error:
        raise _read_error(path, error) from error


def _read_error(path: bytes, error: OSError) -> WanmaError:
    return WanmaError(
        f"cannot read {named([path])}: {error.strerror}",
        f"check the disk, or add the file to .gitignore or {IGNORE_FILE}",
    )


def _write_archive(root: bytes, listing: CodeListing, links: dict[bytes, bytes], destination: Path) -> str:
    """Write the archive, named by the digest of what it contains, and return the digest."""
    try:
        destination.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(".partial", ".snapshot-", destination)
    except OSError as error:
        raise _write_error(destination, error) from error
    partial = Path(name)
    try:
        with open(descriptor, "wb") as output:
            digest = _write_members(root, listing, links, output)
            output.flush()
            os.fsync(descriptor)
        partial.replace(destination / f"{digest}.tar")
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(destination, error) from error
        raise
    return digest


def _write_error(destination: Path, error: OSError) -> WanmaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return WanmaError(
            f"no space for the code snapshot in {destination}: {error.strerror}",
            "free space there, or choose another folder",
        )
    return WanmaError(
        f"cannot write the code snapshot to {destination}: {error.strerror}",
        "make the folder writable, or choose another",
    )


def _write_members(root: bytes, listing: CodeListing, links: dict[bytes, bytes], output: BinaryIO) -> str:
    """Write all members with neither times nor owners, in order of their paths; return the digest."""
    entries = []
    for path, status in sorted(listing.files.items()):
        member = tarfile.TarInfo(path.decode("utf-8", "surrogateescape"))
        if path in links:
            member.type, member.mode = tarfile.SYMTYPE, 0o777
            member.linkname = links[path].decode("utf-8", "surrogateescape")
            output.write(_header(member))
            entries.append(Entry(path, LINK, hashlib.sha256(links[path]).digest()))
            continue
        kind = _kind(status)
        member.size, member.mode = status.st_size, 0o755 if kind == EXECUTABLE else 0o644
        output.write(_header(member))
        entries.append(Entry(path, kind, _hash_file(root, path, status, output.write)))
        output.write(bytes(-status.st_size % tarfile.BLOCKSIZE))
    output.write(bytes(2 * tarfile.BLOCKSIZE))
    return entries_digest(entries)


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
