"""Shared parts of the comparisons: commands, disturbance by other programs, pairs, results.

It runs in wanma's own environment and imports no torch; the contenders are commands.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.pace import product_seconds
from wanma.bench.measurements.measurement import MachineUsage
from wanma.bench.meter.disturbance import DisturbanceLimits, find_disturbances
from wanma.bench.meter.foreign_cpu import ForeignCpu
from wanma.bench.meter.process_tree import adopt_orphans, descendants, end_descendants

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


# ---------------------------------------------------------------- commands


@dataclass(frozen=True)
class Finished:
    """Command that ended well, with all its descendants."""

    started: float
    """Unix time in seconds right before its start."""
    seconds: float
    foreign_cpu: float
    """Mean CPU seconds per second of everything that was neither the command nor this process."""


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
    foreign, started = ForeignCpu(), time.time()
    clock = time.perf_counter()
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
    return Finished(started, seconds, max(foreign.seconds(), 0.0) / seconds)


def _failure(command: Sequence[str], log: Path, what: str) -> BenchmarkError:
    tail = log.read_text(errors="replace")[-3000:]
    return BenchmarkError(f"{shlex.join(command)}\n{what}; the end of its output:\n{tail}")


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Noise:
    """Threshold of a disturbed sample, and number of repetitions."""

    limit: float
    """Maximum foreign CPU seconds per second of an undisturbed sample."""
    retries: int


def take_sample(measure: Callable[[], dict[str, Any]], noise: Noise) -> dict[str, Any]:
    """Take a sample of `measure`, with its `foreign_cpu`; repeat it while others use the CPU.

    Returns:
        the sample with `disturbed`: still true after the last repetition when it never was quiet.
    """
    for attempt in range(noise.retries + 1):
        sample = measure()
        usage = MachineUsage(foreign_cpu=sample["foreign_cpu"])
        sample["disturbed"] = bool(find_disturbances(usage, DisturbanceLimits(noise.limit)))
        sample["repeated"] = attempt
        if not sample["disturbed"]:
            break
        print(f"    disturbed: others used {sample['foreign_cpu']:.2f} CPUs", flush=True)
    return sample


def take_pairs(
    piece: dict[str, Any],
    contenders: Mapping[str, Callable[[], dict[str, Any]]],
    *,
    pairs: int,
    noise: Noise,
    deadline: float,
    save: Callable[[], None],
) -> bool:
    """Sample the contenders in turn until `piece["pairs"]` has `pairs` undisturbed rounds; save each round.

    Every other round has the reverse order, so that a slowdown of the machine, passing or growing, affects
    all contenders alike.

    Args:
        deadline: time of `time.monotonic()` after which no round starts.

    Returns:
        True if the piece is complete.
    """
    rounds: list[dict[str, Any]] = piece.setdefault("pairs", [])
    while len(quiet := undisturbed(piece)) < pairs:
        if time.monotonic() >= deadline:
            return False
        if len(rounds) - len(quiet) >= pairs:
            raise BenchmarkError(
                f"{len(rounds) - len(quiet)} rounds were disturbed by other work; wait for a quiet machine, "
                "or allow more with --foreign-limit"
            )
        taken: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "product_seconds": product_seconds(),
        }
        turns = list(contenders.items())
        for name, measure in turns if len(rounds) % 2 == 0 else reversed(turns):
            taken[name] = take_sample(measure, noise)
        rounds.append(taken)
        save()
    return True


def undisturbed(piece: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rounds of a piece in which no sample was disturbed."""
    return [
        taken
        for taken in piece.get("pairs", [])
        if not any(isinstance(sample, dict) and sample["disturbed"] for sample in taken.values())
    ]


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


def describe_environment(venv: Path) -> dict[str, Any]:
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
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    return f"{cpu}, {cores()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def commit() -> str:
    """Return the repository's commit, with a mark if wanma's source differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    if not name:
        return "unknown"
    return name + (" with changes" if git("status", "--porcelain", "--", "src") else "")


def install_peers(venv: Path, pip_arguments: Sequence[str]) -> None:
    """Create `venv` with wanma of this tree and its peers at the stated versions, beside the same torch.

    Raises:
        BenchmarkError: a step failed.
    """
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *pip_arguments]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    steps = [
        [sys.executable, "-m", "venv", str(venv)],
        [*pip, "--requirement", str(ROOT / "benchmarks" / "requirements.txt"), "--editable", str(ROOT)],
    ]
    for step in steps:
        print(f"$ {shlex.join(step)}", flush=True)
        if subprocess.run(step).returncode != 0:
            raise BenchmarkError(f"setting up {venv} failed at: {shlex.join(step)}")
        (venv / ".gitignore").write_text("*\n")


def carry_out(
    options: argparse.Namespace,
    run: Callable[[argparse.Namespace], None],
    report: Callable[[Sequence[dict[str, Any]]], str],
) -> None:
    """Carry out the command of a comparison: print its report, set up the peers, or measure with `run`."""
    try:
        if options.report:
            print(report(Results(options.results).pieces))
            return
        ensure_peers(options)
        if not options.setup:
            run(options)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")


def common_parser(description: str, benchmark: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7, help="undisturbed rounds of every piece (default 7)")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no round after this; run again to carry on"
    )
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
    parser.add_argument("--setup", action="store_true", help="only install the peers into --venv")
    parser.add_argument(
        "--venv", type=Path, default=Path(os.environ.get("WANMA_BENCH_VENV", ROOT / ".venv-bench")),
        help="the peers' environment (default: $WANMA_BENCH_VENV or .venv-bench); made when missing",
    )  # fmt: skip
    return parser


def ensure_peers(options: argparse.Namespace) -> None:
    """Install the peers if they are missing; $PIP_ARGS goes to pip, as in the Makefile."""
    ready = options.venv / "bin" / "wanma"
    if options.setup or not ready.exists():
        install_peers(options.venv, shlex.split(os.environ.get("PIP_ARGS", "")))


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
