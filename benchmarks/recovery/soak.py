"""Soak test: a run under repeated faults ends with the weights of an undisturbed one.

    python benchmarks/recovery/soak.py --minutes 30 --write       # into docs/results/recovery-soak.md
    python benchmarks/recovery/soak.py --minutes 1 --every 8 --seed 7

First the complete job runs undisturbed and without its pauses, then the same job at the pace that makes it
last so many minutes, while its processes are killed, stopped and made to raise at random moments. Two ranks
that mostly sleep: it may run beside other work. It ends with code 1 if any number differs.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import RESULTS, ROOT, BenchmarkError, table
from benchmarks.recovery.contenders import WanmaRun
from benchmarks.recovery.page import where_and_when
from benchmarks.recovery.watch import read_lines
from wanma.job.run.run_directory import RunDirectory

LOG = RESULTS / "recovery-soak.md"
HEAD = """# Soak test

One run with faults at random times, drawn by a seed: its ranks and fork server are killed, stopped or raise
an exception. `--in-memory-every` is the interval of in-memory checkpoints.

"""
RANKS = 2
PAUSE_SECONDS = 0.2
KINDS = {
    "SIGKILL of a rank": 5,
    "exception in a rank": 3,
    "SIGSTOP of a rank": 2,
    "SIGKILL of both ranks": 2,
    "SIGKILL of the fork server": 2,
}
"""Faults, and their relative frequencies."""
HANG_SECONDS = 5

JOB = """\
[model]
factory = "benchmarks.recovery.paced:Paced"
arguments = {{ pause_seconds = {pause}, orders = "{orders}" }}
[data]
text = ["{corpus}"]
sequence_length = 32
validation_fraction = 0.0
cache = "{cache}"
[train]
steps = {steps}
global_batch = 4
learning_rate = 1e-3
deterministic = true
[parallel]
dp_replicate = {ranks}
[cluster]
device = "cpu"
hang_timeout_seconds = {hang}
max_restarts = 10
[checkpoint]
every_steps = 100
in_memory_every_steps = {in_memory_every}
"""


@dataclass(frozen=True)
class PlannedFault:
    """Planned fault."""

    wait_seconds: float
    """Seconds after the fault before."""
    kind: str
    rank: int


@dataclass(frozen=True)
class InjectedFault:
    """Injected fault."""

    kind: str
    time: float
    """Unix time in seconds."""
    step: int
    """Newest finished step."""


def main() -> int:
    options = parse()
    steps = max(int(options.minutes * 60 / PAUSE_SECONDS), 20)
    print(
        f"seed {options.seed}, {steps:,} steps on {RANKS} ranks, about {options.minutes:g} minutes",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="wanma-soak-") as name:
        folder = Path(name)
        make_inputs(folder)
        began = time.monotonic()
        with running(folder / "undisturbed", steps, 0.0, "off") as process:
            finish(process, folder / "undisturbed", 300 + steps)
        print(f"undisturbed and without pauses: {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        with running(folder / "disturbed", steps, PAUSE_SECONDS, options.in_memory_every) as process:
            faults = inject_faults(
                process,
                folder / "disturbed",
                plan_faults(options.seed, options.every),
                deadline=began + 600 + 2 * 60 * options.minutes,
            )
            finish(process, folder / "disturbed", 60)
        seconds = time.monotonic() - began
        problems = differences(folder / "undisturbed", folder / "disturbed", steps)
        events = read_lines(RunDirectory(folder / "disturbed" / "run").events)
    recoveries = [event for event in events if event["kind"] == "recovery"]
    text = summary(faults, recoveries, steps, seconds, problems, command(options))
    print(f"\n{text}")
    if options.write and not problems:
        LOG.write_text(f"{HEAD}{text}\n{event_log(faults, recoveries)}")
    return 1 if problems else 0


def plan_faults(seed: int, every: float) -> Iterator[PlannedFault]:
    """Yield faults without end, of each kind in its proportion; the same for the same seed."""
    dice = random.Random(seed)
    while True:
        wait = dice.uniform(0.5, 1.5) * every
        (kind,) = dice.choices(list(KINDS), list(KINDS.values()))
        yield PlannedFault(wait, kind, dice.randrange(RANKS))


# ---------------------------------------------------------------- run and fault injection


def make_inputs(folder: Path) -> None:
    corpus = "".join(f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(5_000))
    (folder / "corpus.txt").write_text(corpus)


@contextmanager
def running(place: Path, steps: int, pause: float, in_memory_every: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command in a folder of its own; it does not outlive the context."""
    (place / "orders").mkdir(parents=True)
    job = JOB.format(
        pause=pause,
        orders=place / "orders",
        corpus=place.parent / "corpus.txt",
        cache=place.parent / "cache",
        steps=steps,
        ranks=RANKS,
        hang=HANG_SECONDS,
        in_memory_every=in_memory_every if in_memory_every.isdigit() else f'"{in_memory_every}"',
    )
    (place / "job.toml").write_text(job)
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    with (place / "output.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "wanma", "train", "job.toml", "--run-dir", "run"],
            cwd=place,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()  # the kernel ends its ranks with it
        process.wait()


def finish(process: subprocess.Popen[bytes], place: Path, seconds: float) -> None:
    """Wait for the end of the run.

    Raises:
        BenchmarkError: it failed, or took longer.
    """
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"the run took more than {seconds:.0f} s; {tail(place)}") from None
    if code != 0:
        raise BenchmarkError(f"the run ended with code {code}; {tail(place)}")


def tail(place: Path) -> str:
    return f"the end of its output:\n{(place / 'output.log').read_text(errors='replace')[-3000:]}"


def inject_faults(
    process: subprocess.Popen[bytes], place: Path, faults: Iterator[PlannedFault], deadline: float
) -> list[InjectedFault]:
    """Inject faults from the end of the first step on until the run has ended, or the deadline."""
    run = RunDirectory(place / "run")

    def goes_on() -> bool:
        return process.poll() is None and time.monotonic() < deadline

    while not read_lines(run.metrics):
        if not goes_on():
            raise BenchmarkError(f"the run came to no first step; {tail(place)}")
        time.sleep(0.05)
    injected: list[InjectedFault] = []
    for fault in faults:
        with suppress(subprocess.TimeoutExpired):
            process.wait(fault.wait_seconds)
        while goes_on() and not inject(fault, run, place / "orders"):
            time.sleep(0.05)  # nobody is there: the ranks are just being started again
        if not goes_on():
            return injected
        injected.append(InjectedFault(fault.kind, time.time(), read_lines(run.metrics)[-1]["step"]))
        print(
            f"  {stamp(injected[-1].time)}  step {injected[-1].step:>6,}  {fault.kind} ({fault.rank})",
            flush=True,
        )
    raise AssertionError("there is always another fault")


def inject(fault: PlannedFault, run: RunDirectory, orders: Path) -> bool:
    """Inject a fault; return True if its process existed."""
    pids = [WanmaRun(run.path.parent).newest_process(rank) for rank in range(RANKS)]
    try:
        ranks = [psutil.Process(pid) for pid in pids]
        match fault.kind:
            case "SIGKILL of a rank":
                ranks[fault.rank].kill()
            case "SIGKILL of both ranks":
                for rank in ranks:
                    rank.kill()
            case "SIGSTOP of a rank":
                ranks[fault.rank].suspend()
            case "SIGKILL of the fork server":
                psutil.Process(ranks[fault.rank].ppid()).kill()
            case "exception in a rank":
                (orders / str(fault.rank)).touch()
            case _:
                raise AssertionError(fault.kind)
    except psutil.NoSuchProcess:
        return False
    return True


# ---------------------------------------------------------------- results


def differences(undisturbed: Path, disturbed: Path, steps: int) -> list[str]:
    """Return the differences between the two runs; there should be none."""
    one, other = WanmaRun(undisturbed), WanmaRun(disturbed)
    records = [read_lines(run.progress) for run in (one, other)]
    problems = []
    if [line["step"] for line in records[1]] != list(range(1, steps + 1)):
        problems.append("the record does not have every step once")
    if [line["loss"] for line in records[0]] != [line["loss"] for line in records[1]]:
        problems.append("the losses differ")
    if one.digest() != other.digest():
        problems.append("the final weights or optimizer state differ")
    return problems


def costs(
    faults: Sequence[InjectedFault], recoveries: Sequence[Mapping[str, Any]]
) -> list[tuple[str, float, int]]:
    """Return for each recovery its first fault, the seconds to the next finished step, and repeated steps."""
    found, left = [], list(faults)
    for recovery in recoveries:
        its = [fault for fault in left if fault.time < recovery["time"]]
        left = left[len(its) :]
        if its:
            found.append((its[0].kind, recovery["time"] - its[0].time, recovery["repeated_steps"]))
    return found


def summary(
    faults: Sequence[InjectedFault],
    recoveries: Sequence[Mapping[str, Any]],
    steps: int,
    seconds: float,
    problems: Sequence[str],
    command: str,
) -> str:
    """Return the results as Markdown."""
    rows, found = [], costs(faults, recoveries)
    for kind in KINDS:
        mine = [(cost, again) for what, cost, again in found if what == kind]
        if mine:
            each = [cost for cost, _ in mine]
            spread = f"{statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f})"
            rows.append([kind, str(len(mine)), spread, str(sum(again for _, again in mine))])
    header = ["fault", "recoveries", "seconds to the next step (range)", "steps repeated"]
    repeated = sum(repeated for *_, repeated in found)
    lost = sum(cost for _, cost, _ in found)
    end = "; ".join(problems) or "every step once, equal losses, bit-identical weights and optimizer state"
    sources = sorted({str(recovery["source"]) for recovery in recoveries})
    return (
        f"{seconds / 60:.1f} minutes, {steps:,} steps, {len(faults)} faults, {len(recoveries)} recoveries "
        f"(from {', '.join(sources) or 'nothing'}), {repeated} steps repeated, {lost:.0f} s lost. Compared "
        f"with the undisturbed run: **{end}**.\n\n{table(header, rows)}\n{where_and_when()}:\n\n"
        f"    {command}\n"
    )


def event_log(faults: Sequence[InjectedFault], recoveries: Sequence[Mapping[str, Any]]) -> str:
    """Return all events in the order of time."""
    lines = [(fault.time, f"step {fault.step:,}: {fault.kind}") for fault in faults]
    for event in recoveries:
        told = f"{event['seconds']:.2f} s, {event['repeated_steps']} steps repeated"
        lines.append((event["time"], f"resumed from {event['source']}, step {event['step']:,}; {told}"))
    return "## Events\n\n" + "".join(f"    {stamp(at)}  {text}\n" for at, text in sorted(lines))


def stamp(unix: float) -> str:
    return datetime.datetime.fromtimestamp(unix, datetime.UTC).strftime("%H:%M:%S")


def command(options: argparse.Namespace) -> str:
    return (
        f"python benchmarks/recovery/soak.py --minutes {options.minutes:g} --every {options.every:g} "
        f"--seed {options.seed} --in-memory-every {options.in_memory_every}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="duration of the run without faults (default 30)")
    add(
        "--every",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="mean time between two faults (default 20)",
    )
    add(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10_000),
        help="default: a new one, printed",
    )
    add(
        "--in-memory-every", default="auto", help="checkpoint.in_memory_every_steps of the run (default auto)"
    )
    add(
        "--write",
        action="store_true",
        help=f"write the summary and the log into {LOG.name}",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
