"""Shared parts of the comparisons: commands, rounds by the meter of `wanma bench`, results.

It runs in wanma's own environment; the contenders are commands.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from wanma.bench.meter.disturbance import DisturbanceLimits, DisturbanceRule
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.process_tree import adopt_orphans, descendants, end_descendants
from wanma.bench.programs.contender import Contender
from wanma.bench.runner import MAX_DISTURBED, spread_order
from wanma.bench.statistics.ratios import ERROR_RATE
from wanma.bench.statistics.verdicts import Verdict, judge
from wanma.hardware.measurement.cpu_load import busy_cpu_seconds
from wanma.job.run.resource_limits import cpu_model, usable_cores

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PACKAGES = ("wanma", "torch", "numpy")


class BenchmarkError(Exception):
    """Failure of a contender or of the environment; the message contains the way out."""


@dataclass(frozen=True)
class Start:
    """Command of a contender."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    """File of its output; a contender of `wanma bench` writes `output.log` in the same folder."""

    def contender(self, name: str) -> Contender:
        """Return the command as a contender of `wanma bench`, with these environment variables alone."""
        variables = (f"{key}={value}" for key, value in self.environment.items())
        return Contender(name, "command", command=("env", "-i", *variables, *self.command), folder=str(ROOT))


# ---------------------------------------------------------------- commands


@dataclass(frozen=True)
class Finished:
    """Command that ended well, with all its descendants."""

    started: float
    """Unix time in seconds right before its start."""
    seconds: float


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float,
    folder: Path = ROOT,
) -> Finished:
    """Run `command` in a folder until it and all that it started have ended.

    Raises:
        BenchmarkError: it failed, took too long, or left processes behind; with the end of its output.
    """
    adopt_orphans()
    started, clock = time.time(), time.perf_counter()
    bystanders = {process.pid for process in descendants()}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=dict(environment), cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise _failure(command, log, f"took more than {timeout_seconds:.0f} s") from None
        finally:
            survivors = end_descendants(bystanders)
    seconds = time.perf_counter() - clock
    if code != 0:
        raise _failure(command, log, f"ended with code {code}")
    if survivors:
        raise _failure(command, log, f"left processes behind: {', '.join(survivors)}")
    return Finished(started, seconds)


def run_module(module: str, arguments: Sequence[str], timeout_seconds: float) -> Any:
    """Run a module of `benchmarks` in processes of its own; return what it writes to `--output`, as JSON.

    Raises:
        BenchmarkError: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        output, log = Path(folder) / "output.json", Path(folder) / "log"
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--output", str(output)]
        run_command(command, clean_environment(Path(sys.prefix)), log, timeout_seconds)
        return json.loads(output.read_text())


def _failure(command: Sequence[str], log: Path, what: str) -> BenchmarkError:
    tail = log.read_text(errors="replace")[-3000:]
    return BenchmarkError(f"{shlex.join(command)}\n{what}; the end of its output:\n{tail}")


# ---------------------------------------------------------------- rounds

Piece = dict[str, Any]
"""Settings of a comparison and its rounds: {"settings": {...}, "pairs": [{CONTENDER: SAMPLE, ...}], ...}."""
Sample = dict[str, Any]


def take_pairs(
    piece: Piece,
    contenders: Mapping[str, Callable[[], Sample]],
    options: argparse.Namespace,
    save: Callable[[], None],
) -> bool:
    """Sample the contenders in turn, as `wanma bench` does, until a piece has enough rounds.

    Every other round has the reverse order, so that a slowdown of the machine, passing or growing, affects
    all contenders alike. For the arguments see `take_rounds`.
    """
    rule = disturbance_rule(options)
    order = [list(contenders)[index] for index in spread_order(len(contenders))]

    def take_round(number: int) -> dict[str, Sample]:
        turns = order if number % 2 == 0 else order[::-1]
        return {name: take_sample(contenders[name], rule, options.retries) for name in turns}

    return take_rounds(piece, take_round, options, save)


def take_rounds(
    piece: Piece,
    take_round: Callable[[int], dict[str, Sample]],
    options: argparse.Namespace,
    save: Callable[[], None],
) -> bool:
    """Take rounds until a piece has `options.pairs` undisturbed ones; save each.

    Args:
        piece: piece of the results, to which rounds are added.
        take_round: function from the number of a round to its samples by contender.
        options: those of `common_parser`.
        save: function that writes the results.

    Returns:
        True if the piece is complete; False if the time was over before.

    Raises:
        BenchmarkError: the machine is not quiet.
    """
    rounds: list[dict[str, Any]] = piece.setdefault("pairs", [])
    while len(quiet := undisturbed(piece)) < options.pairs:
        if time.monotonic() >= options.deadline:
            print("the time is over; run the same command again to carry on")
            return False
        if len(rounds) - len(quiet) >= MAX_DISTURBED:
            raise BenchmarkError(
                f"{len(rounds) - len(quiet)} rounds were disturbed by other work; wait for a quiet machine, "
                "or allow more with --foreign-limit"
            )
        rounds.append({**origin(), **take_round(len(rounds))})
        save()
    return True


def take_sample(measure: Callable[[], Sample], rule: DisturbanceRule, retries: int) -> Sample:
    """Take a sample under the meter of `wanma bench`, again while something disturbs it.

    Args:
        measure: function that returns a sample; one of processes that do not descend from this one contains
            `foreign_cpu`, of the time before it.
        rule: rule of disturbances.
        retries: maximum number of repetitions.

    Returns:
        the sample with `foreign_cpu` in CPUs, `repeated`, and `disturbed`: true if no repetition was quiet.
    """
    for attempt in range(retries + 1):
        with MachineMeter() as meter:
            sample = measure()
        usage = replace(meter.usage, foreign_cpu=sample.get("foreign_cpu", meter.usage.foreign_cpu))
        reasons = rule(usage)
        sample |= {"foreign_cpu": usage.foreign_cpu, "disturbed": bool(reasons), "repeated": attempt}
        if not reasons:
            break
        print(f"    disturbed: {' '.join(reasons)}", flush=True)
    return sample


def disturbance_rule(options: argparse.Namespace) -> DisturbanceRule:
    """Return the rule of `wanma bench` with the limit of `common_parser`."""
    return DisturbanceRule(DisturbanceLimits(foreign_cpu=options.foreign_limit))


def busy_cpus(seconds: float) -> float:
    """Wait for so many seconds; return the mean CPUs that all programs of this machine used meanwhile."""
    before = busy_cpu_seconds() or 0.0
    time.sleep(seconds)
    return ((busy_cpu_seconds() or 0.0) - before) / seconds


def origin() -> dict[str, str]:
    """Return date and commit of a round."""
    now = datetime.datetime.now(datetime.UTC)
    return {"date": now.isoformat(timespec="seconds"), "commit": commit()}


def undisturbed(piece: Piece) -> list[dict[str, Any]]:
    """Return the rounds of a piece in which no sample was disturbed."""
    return [
        taken
        for taken in piece.get("pairs", [])
        if not any(isinstance(sample, dict) and sample["disturbed"] for sample in taken.values())
    ]


def rounds_text(piece: Piece) -> str:
    """Return the number of undisturbed rounds, and of disturbed ones if there are any."""
    count = len(undisturbed(piece))
    dropped = len(piece["pairs"]) - count
    return f"{count}" + (f" ({dropped} disturbed)" if dropped else "")


def sample_values(piece: Piece, contender: str, metric: str = "tokens_per_second") -> list[float]:
    """Return a number of a contender's samples, for each undisturbed round."""
    return [float(taken[contender][metric]) for taken in undisturbed(piece)]


def ratios(
    piece: Piece, contender: str = "wanma", baseline: str = "peer", metric: str = "tokens_per_second"
) -> list[float]:
    """Return a number of a contender's samples over the baseline's, for each undisturbed round."""
    pairs = zip(sample_values(piece, contender, metric), sample_values(piece, baseline, metric), strict=True)
    return [value / base for value, base in pairs]


def verdict(
    piece: Piece,
    contender: str = "wanma",
    baseline: str = "peer",
    metric: str = "tokens_per_second",
    comparisons: int = 1,
) -> Verdict:
    """Return the verdict of `wanma bench` on a contender against a baseline, paired by round.

    Args:
        piece: piece of the results with an undisturbed round.
        contender: name of the contender.
        baseline: name of the contender that it is compared with.
        metric: name of a speed, or of seconds.
        comparisons: number of contenders that are compared with the same baseline.
    """
    by_round = (dict(enumerate(sample_values(piece, name, metric))) for name in (baseline, contender))
    is_time = metric.endswith("seconds")
    return judge(*by_round, lower_is_better=is_time, error_rate=ERROR_RATE / comparisons)


# ---------------------------------------------------------------- results


class Results:
    """JSON file of pieces: {"pieces": [{"settings": {...}, "pairs": [...], ...}]}."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[dict[str, Any]] = []
        if path.exists():
            self.pieces = json.loads(path.read_text())["pieces"]

    def piece(self, settings: Mapping[str, Any], fresh: bool) -> dict[str, Any]:
        """Return the piece with exactly these settings; a new one if there is none, or if `fresh`."""
        for piece in self.pieces:
            if piece["settings"] == settings:
                if fresh:
                    piece["pairs"] = []
                    piece.pop("turns", None)
                return piece
        self.pieces.append({"settings": dict(settings), "pairs": []})
        return self.pieces[-1]

    def save(self, report: str) -> None:
        """Write the results, and the report beside them as Markdown."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps({"pieces": self.pieces}, indent=1) + "\n")
        temporary.replace(self.path)
        self.path.with_suffix(".md").write_text(report)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def describe_environments(pieces: Sequence[dict[str, Any]]) -> str:
    """Return the places, versions and dates of the pieces' measurements, each different one once."""
    lines: dict[str, None] = {}
    for piece in pieces:
        machine, versions = piece["environment"]["machine"], piece["environment"]["versions"]
        stated = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines[f"- {machine}; {stated}"] = None
    kept = [rounds for piece in pieces for rounds in (piece["pairs"], *piece.get("turns", {}).values())]
    if rounds := [taken for some in kept for taken in some]:
        dates = sorted(taken["date"] for taken in rounds)
        lines[f"- measured from {dates[0]} to {dates[-1]}"] = None
        commits = list(dict.fromkeys(taken["commit"] for taken in rounds))
        lines[f"- wanma at {', '.join(commits)}"] = None
        products = [taken["product_seconds"] for taken in rounds if "product_seconds" in taken]
        if products:
            lines[
                f"- before a round a fixed matrix product took {min(products) * 1e3:.0f} to "
                f"{max(products) * 1e3:.0f} ms: what neighbours of this machine took from it"
            ] = None
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- environment


def describe_environment(venv: Path = Path(sys.prefix)) -> dict[str, Any]:
    """Return hardware and versions, for the results."""
    script = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    found = subprocess.run(
        [str(venv / "bin" / "python"), "-c", script, *PACKAGES], check=True, capture_output=True, text=True
    )
    return {
        "machine": machine(),
        "versions": {"Python": platform.python_version(), **json.loads(found.stdout)},
    }


def machine() -> str:
    """Return processor, cores, memory and kernel as text."""
    memory = psutil.virtual_memory().total / 2**30
    return f"{cpu_model()}, {usable_cores()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def commit() -> str:
    """Return the repository's commit, with a mark if wanma's source differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    if not name:
        return "unknown"
    return name + (" with changes" if git("status", "--porcelain", "--", "src") else "")


def carry_out(
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], None],
    report: Callable[[Sequence[dict[str, Any]]], str],
) -> None:
    """Carry out the command of a comparison: print its report, or measure with `run`."""
    try:
        if options.report:
            print(report(Results(options.results).pieces))
            return
        run(options)
        print(f"report: {options.results.with_suffix('.md')}")
    except BenchmarkError as error:
        sys.exit(f"error: {error}")


def common_parser(description: str, benchmark: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison, and the environment of its contenders, `venv`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7, help="undisturbed rounds (default %(default)s)")
    parser.add_argument(
        "--minutes", dest="deadline", type=_deadline, default=math.inf,
        help="start no round after this; run again to carry on",
    )  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget the earlier rounds of the chosen pieces")
    parser.add_argument(
        "--foreign-limit", type=float, default=0.1, metavar="CPUS",
        help="a sample in which others used more CPUs than this is repeated (default 0.1)",
    )  # fmt: skip
    parser.add_argument(
        "--retries", type=int, default=2, help="repetitions of a disturbed sample (default 2)"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS / f"{benchmark}.json", help="carried on from run to run"
    )
    parser.add_argument("--report", action="store_true", help="only print the report of the results")
    parser.set_defaults(venv=Path(os.environ.get("WANMA_BENCH_VENV", sys.prefix)))
    return parser


def _deadline(minutes: str) -> float:
    """Return the time of `time.monotonic()` after so many minutes."""
    return time.monotonic() + 60 * float(minutes)


def clean_environment(venv: Path) -> dict[str, str]:
    """Return the environment without variables that would change a contender, with `venv` first on the path.

    wanma is that of this tree, even if `venv` was made for another one.
    """
    dropped = ("OMP_", "MKL_", "KMP_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "THP_", "PYTHON", "TORCH", "WANMA_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **kept,
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
    }
