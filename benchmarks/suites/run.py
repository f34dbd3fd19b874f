"""Results of suites, recorded beside this file, and their page.

    python benchmarks/suites/run.py gpt                # a shipped suite, in full
    python benchmarks/suites/run.py quick-start        # a suite of this folder
    python benchmarks/suites/run.py                    # only write the page

A suite's new result replaces its earlier one. `wanma bench reproduce benchmarks/suites/results/ID` runs one
again. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import RESULTS
from wanma.bench.benchmark import new_directory, open_directory, run_benchmark
from wanma.bench.figures.metrics import DATA_SHARE
from wanma.bench.figures.scaling import find_scalings
from wanma.bench.meter.disturbance import NO_LIMITS, DisturbanceLimits
from wanma.bench.presentation.result_blocks import place_lines, scaling_block
from wanma.bench.presentation.result_tables import markdown_block, markdown_table
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.places import place_contender
from wanma.bench.results.directory import ResultDirectory, list_result_directories
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.runner import duration_seconds
from wanma.bench.stored_suite import read_stored_suite
from wanma.bench.suites.suite_file import Suite, find_suite
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.job.errors import WanmaError

FOLDER = Path(__file__).parent / "results"
PAGE = RESULTS / "suites.md"
UNKEPT = ("runs", "page.html", ".lock")
"""Parts of a result that are not recorded: files of the executions, and what is made from the rest."""
READERS = "{suite}/readers/"
"""Begin of the script of a reader, in the command of a contender."""
CHECK_SECONDS = 900.0


def main() -> None:
    options = parse()
    try:
        for name in options.suite:
            (try_suite if options.small else record_suite)(name, options)
    except WanmaError as error:
        sys.exit(f"error: {error}")
    if options.small:
        return
    PAGE.write_text(report(recorded_results()))


def record_suite(name: str, options: argparse.Namespace) -> None:
    """Measure a suite, or go on with it, and keep its result instead of the earlier one."""
    suite, rule = read_suite_or_job(suite_path(name), environments=options.environments)
    check_readers(suite)
    if options.budget is not None:
        rule = rule.model_copy(update={"budget_seconds": duration_seconds(options.budget)})
    earlier = [
        one for one in list_result_directories(FOLDER) if one.read(with_measurements=False).name == suite.name
    ]
    directory = open_directory(FOLDER, suite, print)
    limits = DisturbanceLimits(foreign_cpu=options.foreign_limit)
    run_benchmark(suite, rule, directory, limits=limits, progress=lambda text: print(text, flush=True))
    for one in earlier:
        if one.path != directory.path:
            shutil.rmtree(one.path)
    for part in UNKEPT:
        path = directory.path / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def try_suite(name: str, options: argparse.Namespace) -> None:
    """Check the readers of a suite on little data, execute each once, and print the figures.

    Raises:
        WanmaError: a reader fails.
    """
    suite, rule = read_suite_or_job(suite_path(name), environments=options.environments)
    contenders = tuple(
        dataclasses.replace(one, command=(*one.command, "--small")) for one in suite.contenders
    )
    suite = dataclasses.replace(suite, contenders=contenders)
    check_readers(suite)
    rule = rule.model_copy(update={"rounds": 1})
    with tempfile.TemporaryDirectory() as folder:
        directory = new_directory(Path(folder), suite)
        result = run_benchmark(suite, rule, directory, limits=NO_LIMITS, progress=print)
    if failed := [one for one in result.measurements if one.error]:
        raise WanmaError(f"{failed[0].contender}: {failed[0].error}", "see the messages above")
    print(markdown_table(result, suite.file.metrics))


def check_readers(suite: Suite) -> None:
    """Let each reader make its data, and compare what it reads in one pass with them.

    Raises:
        WanmaError: a reader gives other samples than the data, or fails.
    """
    commands = {
        _check_command(one, suite): one
        for one in suite.contenders
        if any(READERS in word for word in one.command)
    }
    for command, contender in commands.items():
        began = time.monotonic()
        done = subprocess.run(
            command, env={**os.environ, **contender.environment}, capture_output=True, text=True,
            timeout=CHECK_SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise WanmaError(
                f"the check of '{contender.name}' fails:\n{done.stdout[-2000:]}{done.stderr[-4000:]}",
                f"run it: {' '.join(command)}",
            )
        print(f"{contender.name}: samples are right ({time.monotonic() - began:.1f} s)", flush=True)


def _check_command(contender: Contender, suite: Suite) -> tuple[str, ...]:
    """Return the command of a check, without what it ignores."""
    placed = place_contender(contender, suite.places)
    if placed.python_environment is not None:
        placed.python_environment.check()
    words, ignored = [], {"--start", "--seconds", "--cold"}
    rest = iter(placed.command)
    for word in rest:
        if word not in ignored:
            words.append(word)
        elif word != "--cold":
            next(rest)
    return (*words, "--check")


def suite_path(name: str) -> Path:
    """Return the file of a suite of this folder, or of a shipped one."""
    own = Path(__file__).parent / f"{name}.toml"
    return own if own.exists() else find_suite(name)


def recorded_results() -> list[BenchmarkResult]:
    """Return the recorded results that have ended, by name."""
    results = [one.read() for one in list_result_directories(FOLDER)]
    return sorted((one for one in results if one.ended), key=lambda one: one.name)


def recorded_result(name: str) -> BenchmarkResult:
    """Return the recorded result of a suite.

    Raises:
        KeyError: there is none.
    """
    for result in recorded_results():
        if result.name == name:
            return result
    raise KeyError(name)


def report(results: Sequence[BenchmarkResult]) -> str:
    """Return the page of the results."""
    lines = [
        "# Suites of `wanma bench`\n",
        "Each table is of a recorded result; the command below it runs that again, and tells which figures "
        "lie within its intervals.\n",
    ]
    for result in results:
        lines += _section(result)
    return "\n".join(lines)


def _section(result: BenchmarkResult) -> Iterator[str]:
    suite = read_stored_suite(ResultDirectory(FOLDER / result.id)).suite
    yield f"## {result.title}\n"
    metrics = list(suite.file.metrics)
    if any(DATA_SHARE in summary for summary in result.summaries.values()) and DATA_SHARE not in metrics:
        metrics.append(DATA_SHARE)  # measured of each training of wanma
    yield markdown_table(result, metrics)
    yield from map(markdown_block, map(scaling_block, find_scalings(result)))
    yield f"    wanma bench reproduce benchmarks/suites/results/{result.id}\n"
    yield "".join(f"- {line}\n" for line in place_lines(result))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", nargs="*", help="shipped suites, or suites of this folder")
    parser.add_argument(
        "--budget", metavar="TIME", help="of each suite, such as 10m; default: that of the suite"
    )
    parser.add_argument("--foreign-limit", type=float, default=0.1, metavar="CPUS")
    parser.add_argument(
        "--environments", type=Path, metavar="DIR", help="folder of the Python environments of the peers"
    )
    parser.add_argument("--small", action="store_true", help="only try the readers, on little data")
    return parser.parse_args()


if __name__ == "__main__":
    main()
