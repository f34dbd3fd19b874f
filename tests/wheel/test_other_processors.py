"""The compiled code for aarch64: it compiles, and in an emulator its results have the bits of x86-64."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import CARRIED_SOURCES, COMPILER_FLAGS

SUPPORT = Path(__file__).parents[1] / "support" / "native" / "result_hashes.cpp"
PACKAGE = Path(__file__).parents[2] / "src" / "wanma"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_cpp_compiler() is None, reason="needs the C++ compiler g++"),
    pytest.mark.skipif(shutil.which(CROSS_COMPILER) is None, reason=f"needs {CROSS_COMPILER}"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"needs {EMULATOR}"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs an x86-64 processor"),
]


def compile_code(
    compiler: str, output: Path, *sources: Path, flags: tuple[str, ...] = COMPILER_FLAGS
) -> None:
    command = [compiler, *flags, "-Wall", "-Werror", f"-I{PACKAGE}", *map(str, sources), "-o", str(output)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr


@pytest.mark.parametrize("source", CARRIED_SOURCES)
def test_the_libraries_compile_for_aarch64(source: str, tmp_path: Path) -> None:
    compile_code(CROSS_COMPILER, tmp_path / "library.so", PACKAGE / source)
    assert (tmp_path / "library.so").read_bytes()[18:20] == b"\xb7\x00", "EM_AARCH64"


def test_reductions_and_the_codec_give_equal_bits_on_aarch64(tmp_path: Path) -> None:
    flags = (*(flag for flag in COMPILER_FLAGS if flag != "-shared"), "-static")
    (codec,) = (PACKAGE / source for source in CARRIED_SOURCES if Path(source).stem == "blockwise")
    results = []
    for compiler, *emulator in ((find_cpp_compiler() or "",), (CROSS_COMPILER, EMULATOR)):
        program = tmp_path / f"program-{len(results)}"
        compile_code(compiler, program, SUPPORT, codec, flags=flags)
        run = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True)
        results.append(run.stdout.splitlines())
    assert results[1] == results[0]
    assert results[0][0] == "float16: 1"
    assert len(set(results[0])) == len(results[0]) == 84
