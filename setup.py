"""Additions to the build of the wheel: the examples, and libraries compiled for each level of x86-64.

An editable installation has neither: it uses the folder examples/, and compiles at first use. So does a wheel
that was built on another processor or without a C++ compiler.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "wanma"


def main() -> None:
    setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel}, distclass=PlatformDistribution)


class BuildPackage(build_py):
    """Copy of the package with examples and compiled libraries."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            package = Path(self.build_lib) / "wanma"
            shutil.rmtree(package / "examples", ignore_errors=True)
            shutil.copytree(
                ROOT / "examples", package / "examples", ignore=shutil.ignore_patterns("__pycache__")
            )
            compile_libraries(package)


class BuildWheel(bdist_wheel):
    """Wheel for every Python: the libraries do not use Python's interface."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Distribution that belongs to a platform, if it has compiled libraries."""

    def has_ext_modules(self) -> bool:
        return find_compiler() is not None


def find_compiler() -> str | None:
    """Return the C++ compiler; None: there is none, or the processor is no x86-64."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return None
    return _run_module("cpp_compiler")["find_cpp_compiler"]()


def compile_libraries(package: Path) -> None:
    """Compile each carried library for each level into the copy of the package."""
    compiler = find_compiler()
    if compiler is None:
        print("no C++ compiler, or not x86-64: the wheel carries no compiled libraries", file=sys.stderr)
        return
    native = _run_module("instruction_sets")
    commands = []
    for source in native["CARRIED_SOURCES"]:
        for level in native["CARRIED_LEVELS"]:
            library = native["carried_library"](package / source, level)
            library.parent.mkdir(exist_ok=True)
            flags = [*native["COMPILER_FLAGS"], f"-march={level}"]
            commands.append(
                [compiler, *flags, PACKAGE / source, "-o", library, *native["CARRIED_LINKER_FLAGS"]]
            )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda command: subprocess.run(command, check=True), commands))


def _run_module(name: str) -> dict[str, Any]:
    """Run a module of the package by itself: in the environment of a build, its dependencies are absent."""
    return runpy.run_path(str(PACKAGE / "hardware" / "native" / f"{name}.py"))


if __name__ == "__main__":
    main()
