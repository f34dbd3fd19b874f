"""Requests of one range of bytes, for each kind of store, with the version that the answer belongs to.

fsspec finds files and holds credentials and connections. Its own ranged reads hide what a reader must know:
the version of an answer, a server that ignores ranges, an error of a DataNode that looks like content, and a
store that asks for a pause.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fsspec.asyn import AsyncFileSystem, sync

REQUEST_SECONDS = 60.0
"""Deadline of one request; a whole file has a second more for each MB, see `_read_http`."""


_S3_READ_OPTIONS = (
    "ExpectedBucketOwner",
    "RequestPayer",
    "SSECustomerAlgorithm",
    "SSECustomerKey",
    "SSECustomerKeyMD5",
)
"""Additional arguments of S3 requests, set by the user, that reading takes."""


@dataclass(frozen=True)
class RangeAnswer:
    """Answer of a store to a request of a range."""

    content: bytes
    versions: dict[str, str]
    """Fields of the answer that name the version of the file, such as 'ETag'; empty: the store names none."""
    content_hash: str = ""
    """Hash of the whole file, as 'md5:HEX'; empty: the answer has none."""


class SlowDownError(OSError):
    """Answer of a store that has too many requests; they are tried again after a pause.

    Args:
        retry_after_seconds: pause that the store names; None: none named.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ExpiredCredentialsError(PermissionError):
    """Credentials that were valid until now; a new client may find newer ones."""


class ChangedFileError(Exception):
    """Answer that shows another version of the file than the one to read."""


class NoRangesError(Exception):
    """Server that sends whole files only."""


RangeReader = Callable[[Any, str, int, int], RangeAnswer]
"""Function (filesystem, path, start, end) that requests bytes [start, end) of a file."""


def range_reader(filesystem: Any) -> RangeReader:
    """Return the function that requests ranges from this kind of filesystem."""
    protocol = filesystem.protocol
    names = (protocol,) if isinstance(protocol, str) else tuple(protocol)
    if "s3" in names and hasattr(filesystem, "get_s3"):
        return _read_s3
    if "http" in names and hasattr(filesystem, "encode_url"):
        return _read_http
    if "webhdfs" in names:
        return _read_webhdfs
    return _read_any


def _read_s3(filesystem: Any, path: str, start: int, end: int) -> RangeAnswer:
    async def request() -> RangeAnswer:
        from botocore.exceptions import (
            ClientError,
            NoCredentialsError,
            PartialCredentialsError,
            ProfileNotFound,
            SSOError,
        )
        from s3fs.errors import translate_boto_error

        bucket, key, version_id = filesystem.split_path(path)
        keywords = {k: v for k, v in filesystem.s3_additional_kwargs.items() if k in _S3_READ_OPTIONS}
        keywords |= filesystem.req_kw
        keywords |= {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{end - 1}"}
        if version_id:
            keywords["VersionId"] = version_id
        try:
            await filesystem.set_session()
            client = await filesystem.get_s3(bucket)
            answer = await client.get_object(**keywords)
            async with answer["Body"] as body:
                content = await body.read()
        except ClientError as error:
            raise _s3_error(error) or translate_boto_error(error, set_cause=False) from None
        except (NoCredentialsError, PartialCredentialsError, ProfileNotFound, SSOError) as error:
            raise PermissionError(str(error)) from None
        etag = str(answer.get("ETag", ""))
        return RangeAnswer(content, {"ETag": etag} if etag else {}, _s3_content_hash(answer, etag))

    return _run(filesystem, request)


def _s3_content_hash(answer: Any, etag: str) -> str:
    """Return the MD5 that is the tag of an object of one part without a key of its own; else empty."""
    digest = etag.strip('"')
    has_own_key = answer.get("ServerSideEncryption", "AES256") != "AES256" or answer.get(
        "SSECustomerAlgorithm"
    )
    is_md5 = len(digest) == 32 and all(character in "0123456789abcdef" for character in digest)
    return f"md5:{digest}" if is_md5 and not has_own_key else ""


def _s3_error(error: Any) -> Exception | None:
    """Return the error of an answer that has a meaning of its own here; None: any other."""
    code = error.response.get("Error", {}).get("Code", "")
    metadata = error.response.get("ResponseMetadata", {})
    message = error.response.get("Error", {}).get("Message") or code
    if code in ("SlowDown", "ServiceUnavailable", "Throttling", "RequestLimitExceeded", "503", "429") or (
        metadata.get("HTTPStatusCode") in (429, 503)
    ):
        return SlowDownError(message, retry_after(metadata.get("HTTPHeaders", {}).get("retry-after")))
    if code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"):
        return ExpiredCredentialsError(message)
    if code in ("InvalidRange", "416"):
        return ChangedFileError("it is shorter now")
    return None


def _read_http(filesystem: Any, path: str, start: int, end: int) -> RangeAnswer:
    """Request a range from a web server; a whole file that is no longer than the range is the range."""
    from aiohttp import ClientTimeout

    deadline = REQUEST_SECONDS + (end - start) / 1e6  # aiohttp's own, 5 minutes, is short for a whole file

    async def request() -> RangeAnswer:
        session = await filesystem.set_session()
        keywords = {**filesystem.kwargs, "timeout": ClientTimeout(total=deadline, sock_read=REQUEST_SECONDS)}
        headers = dict(keywords.pop("headers", {}))
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        async with session.get(filesystem.encode_url(path), headers=headers, **keywords) as answer:
            _check_status(answer.status, answer.headers)
            if answer.status == 200:  # the whole file, whatever was asked for
                length = answer.headers.get("Content-Length")
                if start or length is None or int(length) > end:
                    raise NoRangesError
            names = [name for name in ("ETag", "Last-Modified") if answer.headers.get(name)]
            return RangeAnswer(await answer.read(), {name: answer.headers[name] for name in names})

    return _run(filesystem, request, deadline)


def _read_webhdfs(filesystem: Any, path: str, start: int, end: int) -> RangeAnswer:
    """Request a range from the NameNode, and follow its redirect to a DataNode, which is checked, too."""
    deadline = time.monotonic() + REQUEST_SECONDS
    parameters: dict[str, Any] | None = {"op": "OPEN", "offset": start, "length": end - start}
    parameters |= filesystem.pars
    url = _datanode_proxy(filesystem, filesystem.url + quote(path, safe="/="))
    for _ in range(5):
        answer = filesystem.session.get(
            url, params=parameters, allow_redirects=False, stream=True, timeout=REQUEST_SECONDS
        )
        with answer:
            if answer.status_code in (301, 302, 303, 307, 308):
                url, parameters = _datanode_proxy(filesystem, answer.headers["Location"]), None
                continue
            if answer.status_code != 200:
                raise _webhdfs_error(answer) or OSError(f"HTTP status {answer.status_code}")
            pieces = []
            for piece in answer.iter_content(1 << 20):
                pieces.append(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no complete answer within {REQUEST_SECONDS:g} s")
            return RangeAnswer(b"".join(pieces), {})
    raise OSError("too many redirects")


def _datanode_proxy(filesystem: Any, url: str) -> str:
    """Return the address at which the user's `data_proxy` reaches a node of HDFS."""
    proxy = filesystem.proxy
    if callable(proxy):
        return str(proxy(url))
    for host, address in proxy.items():
        url = url.replace(host, address, 1)
    return url


def _webhdfs_error(answer: Any) -> Exception | None:
    """Return the error that the body of an answer names as Hadoop does; None: it names none."""
    try:
        exception = answer.json()["RemoteException"]
        kind, message = str(exception["exception"]), str(exception["message"])
    except (ValueError, KeyError, TypeError):
        _check_status(answer.status_code, answer.headers)
        return None
    first_line = message.splitlines()[0] if message else kind
    if kind == "FileNotFoundException":
        return FileNotFoundError(first_line)
    if kind in ("AccessControlException", "SecurityException", "InvalidToken"):
        return PermissionError(first_line)
    if kind in ("RetriableException", "SafeModeException", "StandbyException"):
        return SlowDownError(f"{kind}: {first_line}", retry_after(answer.headers.get("Retry-After")))
    if "out of the range" in message:  # offset behind the end: IOException of DataNodes
        return ChangedFileError("it is shorter now")
    return OSError(f"{kind}: {first_line}")


def _read_any(filesystem: Any, path: str, start: int, end: int) -> RangeAnswer:
    """Request a range by fsspec's own means: Google's and Azure's storage, Hugging Face, hdfs://."""
    try:
        deadline = {"timeout": REQUEST_SECONDS} if isinstance(filesystem, AsyncFileSystem) else {}
        content = filesystem.cat_file(path, start=start, end=end, **deadline)
    except Exception as error:
        status, headers = _status_of(error)
        if status is not None and not isinstance(error, FileNotFoundError):
            _check_status(status, headers)
        raise
    return RangeAnswer(bytes(content), {})


def _status_of(error: Exception) -> tuple[int | None, Any]:
    """Return the HTTP status and the headers that an exception of a storage library carries."""
    answer = getattr(error, "response", None)
    for holder in (error, answer):
        for name in ("status", "status_code", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and str(value).isdigit():
                return int(value), getattr(answer, "headers", None) or getattr(error, "headers", None) or {}
    return None, {}


def _check_status(status: int, headers: Any) -> None:
    """Raise the error of an HTTP status that has a meaning of its own here, or is any other failure."""
    if status in (429, 503):
        raise SlowDownError(f"HTTP status {status}", retry_after(headers.get("Retry-After")))
    if status in (404, 410):
        raise FileNotFoundError(f"HTTP status {status}")
    if status in (401, 403):
        raise PermissionError(f"HTTP status {status}")
    if status == 416:
        raise ChangedFileError("it is shorter now")
    if status >= 400:
        raise OSError(f"HTTP status {status}")


def retry_after(value: str | None) -> float | None:
    """Return the seconds of a header `Retry-After`; None: absent, or a date, which needs equal clocks."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _run(
    filesystem: Any, request: Callable[[], Awaitable[RangeAnswer]], deadline_seconds: float | None = None
) -> RangeAnswer:
    """Run a request in fsspec's thread, within its deadline; None: `REQUEST_SECONDS`."""
    answer: RangeAnswer = sync(filesystem.loop, request, timeout=deadline_seconds or REQUEST_SECONDS)
    return answer
