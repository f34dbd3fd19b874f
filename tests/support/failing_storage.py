"""A file system at `failing://FOLDER` that fails or truncates as a test says; else it is the local one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from wanma.checkpoint.remote import uploader
from wanma.job.retry import RetryPolicy


class Call(NamedTuple):
    """One operation, the `number`-th of all."""

    number: int
    name: str


def _no_error(_: Call) -> Exception | None:
    return None


def _no(_: Call) -> bool:
    return False


class FailingFileSystem(LocalFileSystem):
    """Operations are counted from 1; all instances share the count and what is to happen."""

    protocol = "failing"
    cachable = False
    lock = threading.Lock()
    calls: ClassVar[list[str]] = []
    fails: ClassVar[Callable[[Call], Exception | None]] = staticmethod(_no_error)
    """The error that a call raises, or None."""
    truncates: ClassVar[Callable[[Call], bool]] = staticmethod(_no)
    """True if a transfer loses its second half unnoticed."""

    @classmethod
    def reset(cls) -> None:
        cls.calls = []
        cls.fails = staticmethod(_no_error)
        cls.truncates = staticmethod(_no)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix("failing://"))

    def put_file(self, lpath: str, rpath: str, **keywords: Any) -> None:
        call = self._count("put_file")
        super().put_file(lpath, rpath, **keywords)
        self._shorten(call, Path(rpath))

    def get_file(self, rpath: str, lpath: str, **keywords: Any) -> None:
        call = self._count("get_file")
        super().get_file(rpath, lpath, **keywords)
        self._shorten(call, Path(lpath))

    def pipe_file(self, path: str, value: bytes, **keywords: Any) -> None:
        call = self._count("pipe_file")
        super().pipe_file(path, value, **keywords)
        self._shorten(call, Path(path))

    def cat_file(self, path: str, **keywords: Any) -> bytes:
        self._count("cat_file")
        return bytes(super().cat_file(path, **keywords))

    def ls(self, path: str, detail: bool = False, **keywords: Any) -> Any:
        self._count("ls")
        return super().ls(path, detail, **keywords)

    def _open(self, path: str, mode: str = "rb", **keywords: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **keywords)
        self._count("open")
        file = super()._open(path, mode, **keywords)
        read = file.read

        def counted(size: int = -1) -> bytes:
            self._count("read")
            return bytes(read(size))

        file.read = counted
        return file

    def rm_file(self, path: str) -> None:
        self._count("rm_file")
        super().rm_file(path)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._count("rm")
        super().rm(path, recursive, maxdepth)

    def _count(self, name: str) -> Call:
        with self.lock:
            self.calls.append(name)
            call = Call(len(self.calls), name)
        if (error := type(self).fails(call)) is not None:
            raise error
        return call

    def _shorten(self, call: Call, path: Path) -> None:
        if type(self).truncates(call):
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])


def register() -> type[FailingFileSystem]:
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    FailingFileSystem.reset()
    return FailingFileSystem


def lose_uploads() -> None:
    """Whatever is sent from this process is lost, and it does not wait long for better times."""
    policy = RetryPolicy(max_attempts=2, initial_backoff_seconds=0.001)
    defaults = uploader.Uploader.__init__.__defaults__
    uploader.Uploader.__init__.__defaults__ = tuple(
        policy if isinstance(value, RetryPolicy) else value for value in defaults
    )

    def fails(call: Call) -> Exception | None:
        return OSError("the bucket is gone") if call.name in ("put_file", "pipe_file") else None

    register().fails = staticmethod(fails)


def refuse_all() -> None:
    register().fails = staticmethod(lambda _: PermissionError("no credentials"))
