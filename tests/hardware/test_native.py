"""C++ of our own: compiled once, for this compiler and processor."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from wanma.hardware.native import native_library
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.native_library import COLLECTIVES_SOURCE, build_library, library_folder
from wanma.job.errors import WanmaError

COMPILER = find_cpp_compiler() or "no compiler"


def write(folder: Path, value: int) -> Path:
    source = folder / "answer.cpp"
    source.write_text(f'#include "answer.hpp"\nextern "C" int answer() {{ return OFFSET + {value}; }}\n')
    (folder / "answer.hpp").write_text("#define OFFSET 0\n")
    return source


def answer(library: Path) -> int:
    return int(ctypes.CDLL(str(library)).answer())


def test_what_is_compiled_is_kept_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    source = write(tmp_path, 41)
    first = build_library(source, COMPILER, place)
    assert answer(first) == 41
    with monkeypatch.context() as patched:
        patched.setattr(native_library.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
        assert build_library(source, COMPILER, place) == first
    (tmp_path / "answer.hpp").write_text("#define OFFSET 1\n")
    second = build_library(source, COMPILER, place)
    assert answer(second) == 42
    kept = {path.suffix for path in library_folder(place).iterdir()}
    assert kept == {".so", ".lock"}, "nothing half-written"


def test_of_several_that_come_at_once_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    source, compiled = write(tmp_path, 7), []
    compile_really = native_library._compile

    def count(*arguments: Path | str) -> None:
        compiled.append(arguments)
        compile_really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(native_library, "_compile", count)
    threads = [threading.Thread(target=build_library, args=(source, COMPILER, place)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert answer(build_library(source, COMPILER, place)) == 7


def test_what_does_not_compile_says_why(tmp_path: Path) -> None:
    source = write(tmp_path, 1)
    source.write_text("this is no C++\n")
    with pytest.raises(WanmaError, match=r"cannot compile answer.cpp: .*error") as error:
        build_library(source, COMPILER, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert "CXX" in error.value.hint


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WanmaError, match="cannot write compiled code to") as error:
        build_library(write(tmp_path, 1), COMPILER, {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert "XDG_CACHE_HOME" in error.value.hint


def test_the_source_of_collectives_is_where_it_is_looked_for() -> None:
    assert COLLECTIVES_SOURCE.is_file()
    assert sorted(path.name for path in COLLECTIVES_SOURCE.parent.iterdir()) == [
        "arena.hpp",
        "collectives.hpp",
        "group.cpp",
        "messages.hpp",
        "reduce.hpp",
    ]
