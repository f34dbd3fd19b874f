"""C++ of our own, compiled where it runs: for this very processor, and once for all runs of a user."""

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

from wanma.hardware.native.cpp_compiler import cpp_compiler
from wanma.job.errors import WanmaError

COLLECTIVES = Path(__file__).parents[2] / "collectives" / "shared_memory" / "native" / "group.cpp"
"""The source of collectives over shared memory."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
"""No product and sum become one operation: numbers do not depend on what a processor can fuse."""
COMPILE_SECONDS = 120.0
"""It takes about four; a compiler that needs longer is not going to end."""
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True)
class NativeLibrary:
    """A source, compiled; or why it is not."""

    path: Path | None
    reason: str = ""


def compiled(source: Path) -> NativeLibrary:
    """`built` by the compiler of this machine, and looked at whether it can be loaded."""
    compiler = cpp_compiler()
    if compiler is None:
        return NativeLibrary(None, "no C++ compiler was found (apt-get install g++)")
    try:
        path = built(source, compiler)
        ctypes.CDLL(str(path))
    except WanmaError as error:
        return NativeLibrary(None, error.message)
    except OSError as error:
        return NativeLibrary(None, f"the compiled code cannot be loaded: {error}")
    return NativeLibrary(path)


def built(source: Path, compiler: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The shared library of `source` and of the headers beside it, compiled unless it is there already.

    Kept in the user's cache folder, by what was compiled, by which compiler and for which processor: machines
    of several kinds may share a home. Of processes that come at once one compiles, and the others wait.

    Raises:
        WanmaError: it does not compile, or there is nowhere to write it.
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
            f"cannot keep compiled code in {folder}: {error.strerror or error}",
            "set XDG_CACHE_HOME to a folder that can be written to",
        ) from error
    return library


def library_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`wanma/native` in the user's cache folder."""
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "wanma" / "native"


def _compile(source: Path, compiler: str, library: Path) -> None:
    """Renamed when it is whole: nobody loads half of it, whoever is killed."""
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=library.parent) as scratch:
        output = Path(scratch) / library.name
        try:
            subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(output)],
                check=True,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip()[:_SHOWN_CHARACTERS]
            raise WanmaError(f"{compiler} does not compile {source.name}: {said}", _OTHER_COMPILER) from error
        except subprocess.TimeoutExpired as error:
            text = f"{compiler} has not compiled {source.name} within {COMPILE_SECONDS:.0f} s"
            raise WanmaError(text, _OTHER_COMPILER) from error
        output.rename(library)


_OTHER_COMPILER = "install g++ 10 or later, or name another compiler with the environment's CXX"


def _fingerprint(source: Path, compiler: str) -> str:
    """Changes with everything that the library depends on."""
    digest = hashlib.sha256()
    for part in [source, *sorted(source.parent.glob("*.hpp"))]:
        digest.update(part.name.encode() + b"\0" + part.read_bytes() + b"\0")
    # Of the compiler, what changes when another is installed: to ask for its version would start a process.
    program = Path(compiler).resolve()
    status = program.stat()
    digest.update(f"{program} {status.st_size} {status.st_mtime_ns} {' '.join(FLAGS)}\0".encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What `-march=native` goes by."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
    first = {line.partition(":")[0].strip(): line for line in reversed(lines) if ":" in line}
    return "\n".join(first[name] for name in named if name in first)
