"""Time from nothing to the first steps of the quick start: from the wheel, and from a clone.

    make wheel && python benchmarks/installation/run.py
    python benchmarks/installation/run.py --report

A round takes some minutes. PIP_ARGS goes to pip, as in the Makefile. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (  # after the path is set
    ROOT,
    BenchmarkError,
    Results,
    carry_out,
    commit,
    common_parser,
    describe_environment,
    run_command,
    take_pairs,
    undisturbed,
)
from benchmarks.installation.report import report

TIMEOUT_SECONDS = 1800.0
INHERITED = ("PIP_", "SSL_", "HTTP", "http", "REQUESTS_", "NO_PROXY", "no_proxy", "LANG", "LC_")
"""Beginnings of the variables that both contenders get."""


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure rounds until there are enough."""
    wheels = [options.wheel] if options.wheel is not None else sorted((ROOT / "dist").glob("*.whl"))
    if not wheels:
        raise BenchmarkError("there is no wheel in dist: run `make wheel`")
    results = Results(options.results)
    settings = {"steps": options.steps, "foreign_limit": options.foreign_limit}
    piece = results.piece(settings, options.fresh)
    if len(undisturbed(piece)) < options.pairs:
        piece["environment"] = describe_environment()
    piece["wheel"] = {"commit": commit(), **_sizes(wheels[-1])}
    contenders = {
        "wheel": partial(_from_wheel, wheels[-1].absolute(), options.steps),
        "clone": partial(_from_clone, options.steps),
    }

    def save() -> None:
        results.save(report(results.pieces))

    take_pairs(piece, contenders, options, save)
    save()  # the sizes are those of this wheel, even if no round was missing


def _from_wheel(wheel: Path, steps: int) -> dict[str, Any]:
    """Install the wheel into a new environment, and train where nothing but that is on the path."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
        folder, venv = Path(name), Path(name) / "environment"
        wanma, environment = str(venv / "bin" / "wanma"), _environment(folder, path=str(venv / "bin"))
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", *_pip_arguments(), str(wheel)]
        commands = [
            [sys.executable, "-m", "venv", str(venv)],
            pip,
            [wanma, "init", "gpt"],
            [wanma, "train", "gpt.toml", f"train.steps={steps}"],
        ]
        return _timed(commands, 2, environment, folder, venv)


def _from_clone(steps: int) -> dict[str, Any]:
    """Clone this repository, and train by `make train`, which installs first."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
        folder, clone = Path(name), Path(name) / "clone"
        environment = _environment(folder, path=os.environ["PATH"])
        make = ["make", "-C", str(clone), f"PYTHON={sys.executable}"]
        make.append(f"PIP_ARGS={shlex.join(_pip_arguments())}")
        commands = [
            ["git", "clone", "--quiet", str(ROOT), str(clone)],
            [*make, "setup"],
            [*make, "train", f"ARGS=train.steps={steps} --run-dir {folder / 'runs' / 'gpt'}"],
        ]
        return _timed(commands, 2, environment, folder, clone / ".venv")


def _timed(
    commands: Sequence[Sequence[str]],
    installing: int,
    environment: Mapping[str, str],
    folder: Path,
    venv: Path,
) -> dict[str, Any]:
    """Run commands one after the other; return seconds from the start of the first.

    Args:
        commands: the commands, of which the last one trains into `runs/gpt`.
        installing: number of the first commands, after which wanma is installed.
        environment: environment variables.
        folder: working directory.
        venv: folder of the virtual environment that the commands make.
    """
    began, ended = time.time(), []
    for command in commands:
        run_command(command, environment, folder / "log", TIMEOUT_SECONDS, folder)
        ended.append(time.time() - began)
    first, *_ = (folder / "runs" / "gpt" / "metrics.jsonl").read_text().splitlines()
    return {
        "install_seconds": round(ended[installing - 1], 2),
        "first_step_seconds": round(json.loads(first)["time"] - began, 2),
        "all_seconds": round(ended[-1], 2),
        "environment_bytes": sum(path.lstat().st_size for path in venv.rglob("*") if path.is_file()),
    }


def _sizes(wheel: Path) -> dict[str, Any]:
    """Return the bytes of a wheel, of its files, and of its compiled libraries, with their levels."""
    files = zipfile.ZipFile(wheel).infolist()
    libraries = [file for file in files if file.filename.endswith(".so")]
    return {
        "wheel_bytes": wheel.stat().st_size,
        "package_bytes": sum(file.file_size for file in files),
        "library_bytes": sum(file.file_size for file in libraries),
        "libraries": len(libraries),
        "levels": sorted({Path(file.filename).parent.name for file in libraries}),
    }


def _environment(folder: Path, path: str) -> dict[str, str]:
    """Return the variables of a contender: an empty home, and pip's cache of the caller."""
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    kept = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
    return {**kept, "PATH": path, "HOME": str(folder / "home"), "PIP_CACHE_DIR": cache}


def _pip_arguments() -> list[str]:
    return shlex.split(os.environ.get("PIP_ARGS", ""))


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "installation")
    parser.set_defaults(pairs=3)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of the job (default 20)")
    parser.add_argument("--wheel", type=Path, help="default: the one in dist/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
