"""C++ of our own: compiled once, for this compiler and processor."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest

from wanma.hardware.native import native_library
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import (
    CARRIED_LEVELS,
    CARRIED_SOURCES,
    carried_library,
    find_carried_library,
    supported_levels,
)
from wanma.hardware.native.native_library import (
    COLLECTIVES_SOURCE,
    build_library,
    find_or_build_library,
    library_folder,
)
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
    with pytest.raises(WanmaError) as error:
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


def test_every_source_is_named_for_the_wheel() -> None:
    package = Path(native_library.__file__).parents[2]
    assert {package / source for source in CARRIED_SOURCES} == set(package.rglob("*.cpp"))


def cpuinfo(folder: Path, *processors: set[str]) -> Path:
    file = folder / "cpuinfo"
    file.write_text("".join(f"processor\t: 0\nflags\t\t: fpu {' '.join(each)}\n\n" for each in processors))
    return file


def test_the_level_is_the_best_that_all_processors_can_run(tmp_path: Path) -> None:
    fourth, third, second = CARRIED_LEVELS.values()
    names = ["x86-64-v4", "x86-64-v3", "x86-64-v2"]
    assert supported_levels(cpuinfo(tmp_path, fourth), "x86_64") == names
    assert supported_levels(cpuinfo(tmp_path, fourth - {"avx512vl"}), "x86_64") == names[1:]
    assert supported_levels(cpuinfo(tmp_path, fourth, third), "x86_64") == names[1:]
    assert supported_levels(cpuinfo(tmp_path, third - {"f16c"}), "x86_64") == names[2:]
    assert supported_levels(cpuinfo(tmp_path, second - {"sse4_1"}), "x86_64") == []
    assert supported_levels(cpuinfo(tmp_path, fourth), "aarch64") == []
    assert supported_levels(tmp_path / "nothing", "x86_64") == []


def carry(source: Path, level: str, value: int) -> Path:
    """Put a library beside `source` that answers `value`, as a wheel does."""
    other = write(source.parent / "other", value)
    library = carried_library(source, level)
    library.parent.mkdir(exist_ok=True)
    library.write_bytes(build_library(other, COMPILER, {"XDG_CACHE_HOME": str(other.parent)}).read_bytes())
    return library


def test_a_carried_library_comes_before_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    source = write(tmp_path, 1)
    second, fourth = carry(source, "x86-64-v2", 2), carry(source, "x86-64-v4", 4)
    flags = CARRIED_LEVELS
    assert find_carried_library(source, cpuinfo(tmp_path, flags["x86-64-v4"])) == fourth
    assert find_carried_library(source, cpuinfo(tmp_path, flags["x86-64-v3"])) == second
    monkeypatch.setattr(native_library, "find_carried_library", lambda _: second)
    monkeypatch.setattr(native_library, "build_library", lambda *_: pytest.fail("compiled"))
    found = find_or_build_library(source)
    assert found.path == second
    assert answer(second) == 2


def test_a_carried_library_that_does_not_load_is_replaced_by_a_compiled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, broken = write(tmp_path, 3), tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(native_library, "find_carried_library", lambda _: broken)
    monkeypatch.setattr(native_library, "find_cpp_compiler", lambda: None)
    without = find_or_build_library(source)
    assert without.path is None
    assert without.failure_reason.startswith("the library of the wheel cannot be loaded (")
    assert without.failure_reason.endswith("and no C++ compiler was found (apt-get install g++)")
    monkeypatch.setattr(native_library, "find_cpp_compiler", lambda: COMPILER)
    compiled = find_or_build_library(source)
    assert compiled.path is not None
    assert answer(compiled.path) == 3
