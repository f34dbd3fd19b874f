"""Speed of the wheel's libraries, on every level that this processor has, beside natively compiled ones.

    make wheel && python benchmarks/libraries/run.py
    python benchmarks/libraries/run.py --report

A round is half a minute, in which the libraries take turns of 0.05 s. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (  # after the path is set
    ROOT,
    BenchmarkError,
    Results,
    carry_out,
    common_parser,
    describe_environment,
    run_module,
    take_pairs,
)
from benchmarks.libraries.report import report
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import CARRIED_SOURCES, carried_library, supported_levels
from wanma.hardware.native.native_library import build_library

ROUND_SECONDS = 600.0


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure rounds until there are enough."""
    results = Results(options.results)
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        packages = _collect_libraries(options.wheel, Path(folder))
        settings = {"levels": list(packages), "foreign_limit": options.foreign_limit}
        piece = results.piece(settings, options.fresh)
        piece["environment"] = describe_environment()
        take_pairs(
            piece,
            {"measured": partial(_sample, packages)},
            options,
            save=lambda: results.save(report(results.pieces)),
        )


def _collect_libraries(wheel: Path | None, folder: Path) -> dict[str, Path]:
    """Return the folders of libraries: natively compiled, and the wheel's by level."""
    wheels = [wheel] if wheel is not None else sorted((ROOT / "dist").glob("*.whl"))
    compiler = find_cpp_compiler()
    if not wheels or compiler is None:
        raise BenchmarkError("needs a wheel and a C++ compiler: run `make wheel`")
    zipfile.ZipFile(wheels[-1]).extractall(folder / "wheel")
    packages = {}
    for name in ("native", *supported_levels()):
        packages[name] = folder / name
        packages[name].mkdir()
        for source in map(Path, CARRIED_SOURCES):
            library = (
                build_library(ROOT / "src" / "wanma" / source, compiler)
                if name == "native"
                else carried_library(folder / "wheel" / "wanma" / source, name)
            )
            (packages[name] / f"{source.stem}.so").symlink_to(library)
    return packages


def _sample(packages: dict[str, Path]) -> dict[str, Any]:
    """Measure one round; return `seconds` by case and library."""
    arguments = ["--packages", *(f"{name}={package}" for name, package in packages.items())]
    return {"seconds": run_module("libraries.measure", arguments, ROUND_SECONDS)}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "libraries")
    parser.add_argument("--wheel", type=Path, help="default: the one in dist/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
