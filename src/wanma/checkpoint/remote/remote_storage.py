"""Folder on any storage that fsspec supports, with retries of the operations where they are safe.

fsspec and the library behind a URL are imported when the first `RemoteStorage` is made, in the process that
uses
it: some start threads of their own, which a fork would not survive.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from wanma.job.errors import EXIT_USAGE, STORAGE_EXTRAS, WanmaError, missing_extra_error
from wanma.job.retry import STORAGE_RETRY_POLICY, RetryingFile, RetryPolicy, retry
from wanma.job.url_credentials import CREDENTIALS_HINT, has_credentials, redact_credentials

Result = TypeVar("Result")

SMALL_FILE_BYTES = 1 << 16


def is_url(text: str) -> bool:
    return "://" in text


def check_url(url: str, key: str) -> None:
    """Reject a URL that no installed library can serve. Connects to nothing and starts no thread.

    Args:
        url: the URL.
        key: key of the job file or command line, for the message.

    Raises:
        WanmaError: names the missing package, or says that there is no such protocol.
    """
    from fsspec import available_protocols, get_filesystem_class
    from fsspec.core import split_protocol

    if has_credentials(url):
        raise WanmaError(f"{key}: the URL contains credentials or a query", CREDENTIALS_HINT, EXIT_USAGE)
    protocol = split_protocol(url)[0] or "file"
    try:
        for part in protocol.split("::"):
            get_filesystem_class(part)
    except ImportError as error:
        if protocol in STORAGE_EXTRAS:
            raise missing_extra_error(*STORAGE_EXTRAS[protocol], f"{key} = '{url}'") from error
        raise WanmaError(f"{key} = '{url}': {error}", "install the missing package", EXIT_USAGE) from error
    except ValueError as error:
        supported = ", ".join(name for name in ("s3", "gs", "abfs", "sftp") if name in available_protocols())
        raise WanmaError(
            f"{key} = '{url}': the storage protocol '{protocol}' is not supported",
            f"use a protocol of fsspec: {supported}, a local folder, ...",
            EXIT_USAGE,
        ) from error


class RemoteStorage:
    """Folder at `url`; paths below are relative to it and use `/`. Safe to use from several threads.

    Args:
        url: the folder's URL.
        policy: limits of the retries.
        stop: once set, no operation begins, or is tried again.
        key: key of the job file or command line, for messages.

    Raises:
        WanmaError: the URL cannot be served; every operation raises it too, naming what failed and why.
    """

    def __init__(
        self,
        url: str,
        policy: RetryPolicy = STORAGE_RETRY_POLICY,
        stop: threading.Event | None = None,
        key: str = "the URL",
    ) -> None:
        check_url(url, key)
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        self._policy = policy
        self._stop = stop
        try:
            self._filesystem, root = url_to_fs(url)
        except Exception as error:  # a storage library may raise anything, such as missing credentials
            raise _failure("cannot open", self.url, error) from error
        self._root = root.rstrip("/")

    def subfolder(self, path: str) -> RemoteStorage:
        """Return the subfolder at `path`."""
        return RemoteStorage(f"{self.url}/{path}", self._policy, self._stop)

    def list_folders(self) -> list[str]:
        """List the names of the folders in it, sorted; empty if it does not exist."""
        return sorted(name for name, entry in self._list("").items() if entry["type"] == "directory")

    def list_files(self, path: str) -> dict[str, int]:
        """Return name and bytes of the files in one of its folders; empty if that does not exist."""
        entries = self._list(path)
        return {name: int(entry["size"]) for name, entry in entries.items() if entry["type"] == "file"}

    def size(self, path: str) -> int | None:
        """Return the bytes of a file; None: no such file."""

        def look() -> int | None:
            self._filesystem.invalidate_cache(self._absolute_path(path).rpartition("/")[0])
            try:
                info = self._filesystem.info(self._absolute_path(path))
            except FileNotFoundError:
                return None
            return int(info["size"]) if info.get("type", "file") == "file" else None

        return self._retry("cannot read the size of", path, look)

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None: no such file."""

        def fetch() -> bytes | None:
            try:
                return bytes(self._filesystem.cat_file(self._absolute_path(path)))
            except FileNotFoundError:
                return None

        return self._retry("cannot read", path, fetch)

    def read_small(self, path: str) -> bytes | None:
        """Return the content of a file of at most `SMALL_FILE_BYTES`, by one request; None: no such file."""
        return self._retry("cannot read", path, lambda: self._read_small(path))

    def write(self, path: str, content: bytes, *, verifies: bool = True) -> None:
        """Write a small file, and read it back to verify its content, unless `verifies` is False."""

        def send() -> None:
            self._with_parent_folder(
                path, lambda: self._filesystem.pipe_file(self._absolute_path(path), content)
            )
            if not verifies:
                return
            stored = self._filesystem.cat_file(self._absolute_path(path))
            if stored != content:
                raise OSError(f"{len(content):,} bytes were written, {len(stored):,} others read back")

        self._retry("cannot write", path, send)

    def create(self, path: str, content: bytes) -> bool:
        """Write a small file if there is none; return False if it exists with another content.

        Libraries raise different errors for a file that exists, and an answer may be lost on its way back: so
        the content decides, and must be the writer's own.
        """

        def send() -> bool:
            try:
                self._filesystem.pipe_file(self._absolute_path(path), content, mode="create")
            except Exception:
                if (existing := self._read_small(path)) is None:
                    raise
                return existing == content
            return True

        return self._retry("cannot create", path, send)

    def upload_file(self, local: Path, path: str) -> None:
        """Upload a file and verify its size."""
        local_bytes = local.stat().st_size  # raises FileNotFoundError itself: not a failure of the storage

        def send() -> None:
            self._with_parent_folder(
                path, lambda: self._filesystem.put_file(str(local), self._absolute_path(path))
            )
            self._filesystem.invalidate_cache(self._absolute_path(path).rpartition("/")[0])
            uploaded_bytes = self._filesystem.info(self._absolute_path(path))["size"]
            if uploaded_bytes != local_bytes:
                raise OSError(f"{uploaded_bytes:,} of {local_bytes:,} bytes arrived")

        self._retry("cannot write", path, send)

    def copy_file(self, source: str, path: str, size: int) -> bool:
        """Copy a file of `size` bytes within the storage; return False where it cannot.

        It is tried once: a file that is not copied can be sent.
        """
        parent = self._absolute_path(path).rpartition("/")[0]

        def copy() -> bool:
            try:
                self._with_parent_folder(
                    path,
                    lambda: self._filesystem.cp_file(self._absolute_path(source), self._absolute_path(path)),
                )
                self._filesystem.invalidate_cache(parent)
                return int(self._filesystem.info(self._absolute_path(path))["size"]) == size
            except Exception:  # a storage library may raise anything, and some cannot copy
                return False

        return self._run_unless_stopped("cannot copy", path, copy)

    def download_file(self, path: str, local: Path, size: int) -> None:
        """Download a file of `size` bytes, and sync it to disk."""

        def fetch() -> None:
            self._filesystem.get_file(self._absolute_path(path), str(local))
            with local.open("rb+") as file:
                os.fsync(file.fileno())
                received_bytes = file.seek(0, os.SEEK_END)
            if received_bytes != size:
                raise OSError(f"{received_bytes:,} of {size:,} bytes arrived")

        self._retry("cannot download", path, fetch)

    def open(self, path: str) -> RetryingFile:
        """Open a file for reading, as a context manager; a read that failed too often raises its error."""
        return self._run_unless_stopped(
            "cannot read",
            path,
            lambda: RetryingFile(
                lambda: self._filesystem.open(self._absolute_path(path), "rb"), self._policy, stop=self._stop
            ),
        )

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""

        def remove() -> None:
            try:
                self._filesystem.rm_file(self._absolute_path(path))
            except FileNotFoundError:
                return

        self._retry("cannot remove", path, remove)

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it, if it exists."""

        def remove() -> None:
            self._filesystem.invalidate_cache()
            try:
                self._filesystem.rm(self._absolute_path(path), recursive=True)
            except FileNotFoundError:
                return

        self._retry("cannot remove", path, remove)

    def _list(self, path: str) -> dict[str, dict[str, Any]]:
        def look() -> dict[str, dict[str, Any]]:
            self._filesystem.invalidate_cache()
            try:
                entries = self._filesystem.ls(self._absolute_path(path), detail=True)
            except FileNotFoundError:
                return {}
            return {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in entries}

        return self._retry("cannot list", path, look)

    def _read_small(self, path: str) -> bytes | None:
        try:  # a range: without one, s3fs first asks for the size, and may take it from an older listing
            content = self._filesystem.cat_file(self._absolute_path(path), start=0, end=SMALL_FILE_BYTES)
        except FileNotFoundError:
            return None
        return bytes(content)

    def _absolute_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _with_parent_folder(self, path: str, send: Callable[[], object]) -> None:
        """Send, and make the parent folder if it is missing; object stores have no folders."""
        try:
            send()
        except FileNotFoundError:
            self._filesystem.makedirs(self._absolute_path(path).rpartition("/")[0], exist_ok=True)
            send()

    def _retry(self, failure: str, path: str, operation: Callable[[], Result]) -> Result:
        return self._run_unless_stopped(
            failure, path, lambda: retry(operation, self._policy, stop=self._stop)
        )

    def _run_unless_stopped(self, failure: str, path: str, operation: Callable[[], Result]) -> Result:
        if self._stop is not None and self._stop.is_set():
            raise WanmaError(f"{failure} {self.url}/{path}: the run is stopping")
        try:
            return operation()
        except Exception as error:  # a storage library may raise anything
            raise _failure(failure, f"{self.url}/{path}".rstrip("/"), error) from error


def _failure(problem: str, location: str, error: Exception) -> WanmaError:
    """Build one message, without credentials that a library may have put into its own."""
    error_text = getattr(error, "strerror", None) or str(error)
    cause = f"{type(error).__name__}: {error_text}" if error_text else type(error).__name__
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    hint = "check the network, the credentials and the free space of the storage"
    return WanmaError(redact_credentials(f"{problem} {location}: {cause}{notes}"), hint)
