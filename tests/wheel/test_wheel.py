"""The wheel: its files, its compiled libraries on every level, and a machine without a compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support.native_levels import codec_results, collective_results, row_results
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import (
    CARRIED_LEVELS,
    CARRIED_SOURCES,
    carried_library,
    supported_levels,
)
from wanma.hardware.native.native_library import build_library

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv-wheel" / "bin"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_cpp_compiler() is None, reason="needs the C++ compiler g++"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs an x86-64 processor"),
]


def _build(tree: Path, kind: str, folder: Path, environment: dict[str, str] | None = None) -> Path:
    """Build an 'sdist' or a 'wheel' of `tree` with the build backend, as pip does."""
    code = f"import sys; from setuptools.build_meta import build_{kind}; build_{kind}(sys.argv[1])"
    folder.mkdir()
    built = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env=environment,
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (package,) = folder.iterdir()
    return package


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the repository, so that a build leaves nothing in it."""
    copy = tmp_path_factory.mktemp("tree")
    unused = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "examples"):
        shutil.copytree(ROOT / name, copy / name, ignore=unused)
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tree, "wheel", tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package as pip unpacks it."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def _digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_the_wheel_has_the_package_the_examples_and_libraries_of_every_level(installed: Path) -> None:
    package = installed / "wanma"
    wanted = {
        path.relative_to(ROOT / "src")
        for path in (ROOT / "src" / "wanma").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    examples = {
        Path("wanma/examples") / path.name for path in (ROOT / "examples").iterdir() if path.is_file()
    }
    libraries = {
        carried_library(Path("wanma") / source, level)
        for source in CARRIED_SOURCES
        for level in CARRIED_LEVELS
    }
    assert len(libraries) == 9
    found = {path.relative_to(installed) for path in package.rglob("*") if path.is_file()}
    assert found == wanted | examples | libraries
    for example in examples:
        assert (installed / example).read_bytes() == (ROOT / "examples" / example.name).read_bytes()


def test_the_wheel_is_for_every_python_on_the_systems_of_pytorch(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    if not TOOLS.exists():
        pytest.skip("needs auditwheel: make wheel")
    audit = subprocess.run(
        [TOOLS / "python", "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=True
    ).stdout
    assert '"manylinux_2_24_x86_64"' in audit, audit


def test_the_source_package_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = _build(tree, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert _digests(_build(unpacked, "wheel", tmp_path / "again")) == _digests(wheel)


def test_without_a_compiler_the_wheel_carries_the_source_for_every_platform(
    tree: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tree, tmp_path / "tree", ignore=shutil.ignore_patterns("build"))
    wheel = _build(copy, "wheel", tmp_path / "wheel", {"PATH": str(tmp_path)})
    assert wheel.name.endswith("-py3-none-any.whl")
    files = _digests(wheel)
    assert [name for name in files if name.endswith(".so")] == []
    assert [source for source in CARRIED_SOURCES if f"wanma/{source}" not in files] == []


@pytest.mark.parametrize("results", [collective_results, codec_results, row_results])
def test_all_levels_and_the_native_library_give_equal_bits(results, installed: Path) -> None:  # type: ignore[no-untyped-def]
    """Checked on the levels that this processor can run; the last one is always there."""
    levels = supported_levels()
    assert levels[-1] == "x86-64-v2"
    (relative,) = (one for one in CARRIED_SOURCES if Path(one).stem == results.library)
    native = results(build_library(ROOT / "src" / "wanma" / relative, find_cpp_compiler() or ""))
    assert len(native) > 4
    for level in levels:
        carried = results(carried_library(installed / "wanma" / relative, level))
        assert [name for name, value in carried.items() if value != native[name]] == [], level


def _run_without_tools(installed: Path, folder: Path, *command: str) -> str:
    """Run Python with the installed package, where no compiler, git, make or cache can be found."""
    (folder / "bin").mkdir(exist_ok=True)
    environment = {
        "PATH": str(folder / "bin"),
        "PYTHONPATH": str(installed),
        "HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "WANMA_MEASURE_CPU": "0",
    }
    finished = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_without_a_compiler_the_carried_libraries_are_used(installed: Path, tmp_path: Path) -> None:
    code = """
from wanma.collectives.compression.int8_codec import NATIVE_SOURCE
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.native_library import COLLECTIVES_SOURCE, find_or_build_library
from wanma.parallel.embedding import native_rows
assert find_cpp_compiler() is None
print(find_or_build_library(COLLECTIVES_SOURCE).path)
print(find_or_build_library(NATIVE_SOURCE).path)
print(find_or_build_library(native_rows.NATIVE_SOURCE).path)
"""
    level = supported_levels()[0]
    assert _run_without_tools(installed, tmp_path, "-c", code).splitlines() == [
        str(carried_library(installed / "wanma" / source, level)) for source in CARRIED_SOURCES
    ]


def test_without_a_clone_and_a_compiler_the_quick_start_trains_over_shared_memory(
    installed: Path, tmp_path: Path
) -> None:
    written = _run_without_tools(installed, tmp_path, "-m", "wanma", "init", "gpt")
    assert "wanma train gpt.toml" in written
    small = ("model.layers=1", "model.hidden=32", "data.sequence_length=32", "parallel.compile=false")
    told = _run_without_tools(
        installed, tmp_path, "-m", "wanma", "train", "gpt.toml", "train.steps=2", *small
    )
    assert "finished at step 2" in told
    logs = "".join(log.read_text() for log in (tmp_path / "runs" / "gpt" / "logs").glob("rank-*.log"))
    assert "2 ranks use shared memory" in logs
    assert not (tmp_path / "home" / ".cache" / "wanma" / "native").exists(), "something was compiled"
