"""Lookup of wanma's C++ libraries: carried by the wheel, or compiled for this node's processor.

A library is compiled once for all runs of a user.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import COMPILER_FLAGS, find_carried_library
from wanma.job.errors import WanmaError
from wanma.job.run.user_cache import user_cache_folder

COLLECTIVES_SOURCE = Path(__file__).parents[2] / "collectives" / "shared_memory" / "native" / "group.cpp"
"""Source of the collectives over shared memory."""
NATIVE_FLAGS = (*COMPILER_FLAGS, "-march=native")
"""Compiler flags for this node's processor."""
COMPILE_TIMEOUT_SECONDS = 120.0
"""Timeout in seconds; a compilation takes about four."""
_MAX_ERROR_CHARACTERS = 2000


@dataclass(frozen=True)
class NativeLibrary:
    """Compiled library, or the reason why there is none."""

    path: Path | None
    failure_reason: str = ""
    hint: str = ""
    """Remedy, if the reason does not name it."""


def find_or_build_library(source: Path) -> NativeLibrary:
    """Return the library of `source` that the wheel carries for this processor, else compile it.

    The library is checked: it loads. Carried and compiled libraries give equal bits.
    """
    carried = find_carried_library(source)
    load_error = "" if carried is None else _load_error(carried)
    if carried is not None and not load_error:
        return NativeLibrary(carried)
    compiler = find_cpp_compiler()
    if compiler is None:
        reason = "no C++ compiler was found (apt-get install g++)"
        if load_error:
            reason = f"the library of the wheel cannot be loaded ({load_error}), and {reason}"
        return NativeLibrary(None, reason)
    try:
        path = build_library(source, compiler)
    except WanmaError as error:
        return NativeLibrary(None, error.message, error.hint)
    if load_error := _load_error(path):
        return NativeLibrary(None, f"the compiled code cannot be loaded: {load_error}")
    return NativeLibrary(path)


def _load_error(library: Path) -> str:
    """Load a library and return the linker's error; empty: there is none."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return ""


def build_library(source: Path, compiler: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the shared library of `source`, with the headers beside it and here; compiled unless cached.

    It is stored in the user's cache folder under a hash of source, compiler and processor: nodes of several
    kinds may share a home. If several processes ask at once, one compiles and the others wait.

    Raises:
        WanmaError: the source does not compile, or the folder cannot be written.
    """
    folder = library_folder(environment)
    library = folder / f"{source.stem}-{_fingerprint(source, compiler)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{source.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile(source, compiler, library)
    except OSError as error:
        raise WanmaError(
            f"cannot write compiled code to {folder}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a writable folder",
        ) from error
    return library


def library_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `wanma/native` in the user's cache folder."""
    return user_cache_folder(environment) / "native"


def _compile(source: Path, compiler: str, library: Path) -> None:
    """Compile `source` to a scratch file, renamed when complete, so that a kill leaves no partial library."""
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        try:
            subprocess.run(
                [compiler, *NATIVE_FLAGS, str(source), "-o", str(output)],
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=COMPILE_TIMEOUT_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            compiler_output = error.stderr.strip()[:_MAX_ERROR_CHARACTERS]
            raise WanmaError(
                f"{compiler} cannot compile {source.name}: {compiler_output}", _OTHER_COMPILER_HINT
            ) from error
        except subprocess.TimeoutExpired as error:
            text = f"{compiler} did not finish {source.name} within {COMPILE_TIMEOUT_SECONDS:.0f} s"
            raise WanmaError(text, _OTHER_COMPILER_HINT) from error
        output.rename(library)


_OTHER_COMPILER_HINT = "install g++ 10 or later, or set the environment variable CXX to another compiler"


def _fingerprint(source: Path, compiler: str) -> str:
    """Return a hash of everything that the library depends on: sources, compiler, flags and processor."""
    digest = hashlib.sha256()
    folders = source.parent, Path(__file__).parent
    for part in [source, *sorted(header for folder in folders for header in folder.glob("*.hpp"))]:
        digest.update(part.name.encode() + b"\0" + part.read_bytes() + b"\0")
    # The compiler is identified by path, size and time: to ask for its version would start a process.
    program = Path(compiler).resolve()
    status = program.stat()
    digest.update(f"{program} {status.st_size} {status.st_mtime_ns} {' '.join(NATIVE_FLAGS)}\0".encode())
    digest.update(_processor_identity().encode())
    return digest.hexdigest()[:24]


def _processor_identity() -> str:
    """Return the lines of /proc/cpuinfo that determine `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    identity_keys = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "flags",
        "Features",
        "CPU part",
    )
    first_values = {line.partition(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first_values[name] for name in identity_keys if name in first_values)
