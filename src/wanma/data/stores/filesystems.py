"""Filesystems (fsspec) behind entries of a job: local or remote, with a thread or without; their errors."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from fsspec.core import get_filesystem_class, url_to_fs
from fsspec.utils import get_protocol

from wanma.job.errors import STORAGE_EXTRAS, JobError, WanmaError, missing_extra_error
from wanma.job.url_credentials import CREDENTIALS_HINT, redact_credentials

log = logging.getLogger("wanma.data")

_PATHS_WITHOUT_HOST = ("webhdfs", "hdfs")
"""Protocols whose paths in fsspec lack the host of the URL."""
_NAMENODE_HTTP_PORT = 9870
"""Default HTTP port of a NameNode since Hadoop 3, which serves WebHDFS."""
_KNOWN_PROTOCOLS = (
    "URLs start with one of file://, memory://, http://, s3://, gs://, abfs://, hf://, hdfs://, webhdfs://"
)


def open_filesystem(entry: str) -> tuple[Any, str]:
    """Return the filesystem of `entry` without remembered listings, and the path of `entry` in it.

    `hdfs://` needs Hadoop's native library; without it the entry is read by WebHDFS.

    Raises:
        ValueError: unknown protocol, or no host in the URL.
        ImportError: the package for the protocol is not installed.
        WanmaError: `hdfs://` without Hadoop's native library and without a host.
    """
    try:
        filesystem, path = url_to_fs(entry)
    except (TypeError, KeyError) as error:  # a missing argument of the constructor, such as the host
        raise ValueError(f"incomplete address ({error})") from error
    except OSError as error:
        if get_protocol(entry) != "hdfs" or not _is_missing_library(error):
            raise
        filesystem, path = _open_webhdfs(entry)
    filesystem.invalidate_cache()
    return filesystem, path


def _is_missing_library(error: OSError) -> bool:
    """Return True for the errors of pyarrow at its first and at later attempts."""
    return str(error).startswith(("Unable to load lib", "Prior attempt to load lib"))


def _open_webhdfs(entry: str) -> tuple[Any, str]:
    """Open an entry `hdfs://` by WebHDFS, at the default HTTP port of its NameNode, and say so."""
    address = urlsplit(entry)
    shown = redact_credentials(entry)
    if not address.hostname:
        raise WanmaError(
            f"'{shown}' names no host, and Hadoop's native library (libhdfs, libjvm), which knows the "
            "default one, cannot be loaded",
            "write webhdfs://HOST:PORT/PATH with the HTTP address of the NameNode, or set HADOOP_HOME and "
            "JAVA_HOME",
        )
    user = f"{address.username}@" if address.username else ""
    host = f"[{address.hostname}]" if ":" in address.hostname else address.hostname
    webhdfs = f"webhdfs://{user}{host}:{_NAMENODE_HTTP_PORT}"
    try:
        filesystem, path = url_to_fs(entry.replace(f"hdfs://{address.netloc}", webhdfs, 1))
    except ImportError as error:
        raise missing_extra_error(*STORAGE_EXTRAS["webhdfs"], f"'{shown}'") from error
    _tell_of_webhdfs(f"hdfs://{host}", f"{host}:{_NAMENODE_HTTP_PORT}")
    return filesystem, path


@functools.cache  # one warning for each server
def _tell_of_webhdfs(address: str, server: str) -> None:
    log.warning(
        "%s is read by WebHDFS at %s: Hadoop's native library (libhdfs, libjvm) cannot be loaded; if the "
        "HTTP port of its NameNode is another one, write webhdfs://HOST:PORT/PATH",
        address,
        server,
    )


def file_url(filesystem: Any, path: str, entry: str) -> str:
    """Return the address of a file that `entry` names or contains: a URL, and of a local file its path.

    HDFS keeps the host of `entry`.
    """
    if is_local(filesystem):
        return path
    if _protocols(filesystem)[0] in _PATHS_WITHOUT_HOST:
        address = urlsplit(entry)
        return f"{address.scheme}://{address.netloc}{path}"
    url: str = filesystem.unstrip_protocol(path)
    return url


def is_local(filesystem: Any) -> bool:
    """Return True for local storage, whose failures persist: only network access is retried."""
    return "file" in _protocols(filesystem)


def is_shared_memory(filesystem: Any) -> bool:
    """Return True for the files in this process's memory (`memory://`), which no other process can read."""
    return "memory" in _protocols(filesystem)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def is_remote_entry(entry: str) -> bool:
    """Return True if reading `entry` takes a network, or fsspec's thread for asynchronous storage."""
    for part in entry.split("::"):
        protocol = get_protocol(part)
        if protocol in STORAGE_EXTRAS:
            return True
        with suppress(ImportError, ValueError):  # cannot be read at all, which the listing reports better
            if get_filesystem_class(protocol).async_impl:
                return True
    return False


def unreadable_error(name: str, key: str, error: Exception) -> WanmaError:
    """Return the error for a file or an entry that cannot be read, with its cause and without credentials."""
    name = redact_credentials(name)
    prefix = f"{key}: " if key else ""
    if isinstance(error, PermissionError):
        if "://" in name and not name.startswith("file://"):
            return WanmaError(
                f"{prefix}no permission to read '{name}': {_cause(error)}",
                f"allow this user to read it, or renew expired credentials; {CREDENTIALS_HINT}",
            )
        return WanmaError(
            f"{prefix}no permission to read '{name}'", "change the permissions of the file, or exclude it"
        )
    if isinstance(error, ImportError):
        protocol = name.partition("://")[0]
        if protocol in STORAGE_EXTRAS:
            return missing_extra_error(*STORAGE_EXTRAS[protocol], f"{key} = '{name}'" if key else f"'{name}'")
        return JobError(f"{prefix}'{name}' needs a package that is not installed: {error}")
    if isinstance(error, ValueError):
        return JobError(f"{prefix}'{name}' is not a readable path or URL: {_cause(error)}", _KNOWN_PROTOCOLS)
    return WanmaError(f"{prefix}cannot read '{name}': {_cause(error)}")


def _cause(error: Exception) -> str:
    """Return the text of an error and of its retries, without the secrets in its URLs."""
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return redact_credentials(cause + notes)


def shown_cause(error: Exception) -> Exception | None:
    """Return `error` as the cause of another; None if its text holds credentials, which logs would show."""
    name = getattr(error, "filename", None)
    texts = [str(error), *([name] if isinstance(name, str) else [])]
    return error if all(redact_credentials(text) == text for text in texts) else None
