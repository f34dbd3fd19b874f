"""Effect of approximate gradient exchanges on the loss, beside uncompressed gradients.

    python benchmarks/convergence/run.py --methods none int8 --seeds 1 --minutes 10    # some runs
    python benchmarks/convergence/run.py                                     # all that are missing
    python benchmarks/convergence/run.py --report

Every method trains the example model from the same weights on the same samples as uncompressed gradients do,
for each seed, with the same settings. Other load of the machine changes the duration of a run, and none of
the measured values. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import RESULTS, BenchmarkError, commit, machine, run_command, table
from benchmarks.slow_links.contenders import OUTER
from wanma.job.file.upgrade import upgraded

STATE = RESULTS / "convergence.json"
TIMEOUT_SECONDS = 3600.0
WHOLE = "none"

_SELDOM = ("synchronize_every = 20", "synchronous_steps = 200")

METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    WHOLE: ("whole gradients", ()),
    "bf16": ("rounded to bf16", ('compression = "bf16"',)),
    "fp16": ("rounded to fp16", ('compression = "fp16"',)),
    "int8": ("rounded to int8, error feedback", ('compression = "int8"',)),
    "topk": ("1 % largest elements, error feedback", ('compression = "topk"',)),
    "powersgd": ("PowerSGD of rank 4, error feedback", ('compression = "powersgd"',)),
    "local_sgd": (
        "local SGD, 2 sites, every 20 steps, the first 200 together",
        ('synchronize = "local_sgd"', *_SELDOM),
    ),
    "diloco": (
        "DiLoCo, likewise",
        ('synchronize = "diloco"', *_SELDOM, *OUTER),
    ),
    "streaming": (
        "DiLoCo, likewise, in 2 fragments beside 5 steps each",
        ('synchronize = "diloco"', *_SELDOM, *OUTER, "fragments = 2", "overlap_steps = 5"),
    ),
    "local_sgd_at_once": (
        "local SGD, every 20 steps from the first on",
        ('synchronize = "local_sgd"', "synchronize_every = 20"),
    ),
    "diloco_at_once": (
        "DiLoCo, likewise, with the published rate 0.7 and momentum 0.9",
        ('synchronize = "diloco"', "synchronize_every = 20"),
    ),
    "stale": ("gradients of the other site a step late", ('synchronize = "delayed"', "staleness = 1")),
}
"""Methods by name: title, and lines of `[parallel]`. A further method is a further line."""

USUAL = [name for name in METHODS if not name.endswith("_at_once")]
"""Methods measured with several seeds; the others show the value of a synchronous start by one seed."""


@dataclass(frozen=True)
class Setting:
    """Settings shared by all methods."""

    steps: int
    batch: int
    sequence: int

    def job(self, method: str, seed: int) -> str:
        lines = "\n".join(("dp_replicate = 2", *METHODS[method][1]))
        return f"""\
[model]  # of examples/gpt.toml
family = "decoder"
layers = 4
hidden = 256
heads = 4

[data]
text = ["stdlib"]
sequence_length = {self.sequence}

[train]
steps = {self.steps}
global_batch = {self.batch}
learning_rate = 1e-3
final_learning_rate_share = 0.0
warmup_steps = 100
validation_samples = 1024
seed = {seed}

[parallel]
{lines}

[cluster]
device = "cpu"

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""


def main() -> None:
    options = parse()
    runs: list[dict[str, Any]] = json.loads(STATE.read_text())["runs"] if STATE.exists() else []
    for run in runs:
        run["job"] = upgraded(run["job"])[0]
    try:
        if not options.report:
            measure(runs, options)
    except BenchmarkError as error:
        sys.exit(f"error: {error}")
    print(report(runs))


def measure(runs: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Run all missing trainings; the state is saved after each."""
    deadline = time.monotonic() + options.minutes * 60
    setting = Setting(options.steps, options.batch, options.sequence)
    # Seed by seed, so that every way has as many when the time is over.
    for seed, method in itertools.product(range(1, options.seeds + 1), options.methods):
        job = setting.job(method, seed)
        if any(run["job"] == job for run in runs):
            continue
        if time.monotonic() >= deadline:
            print("the time is over; run the same command again to carry on")
            return
        run = {"method": method, "seed": seed, **train(job), "job": job}
        print(
            f"{method}, seed {seed}: {run['first']:.4f} to {run['validation']:.4f}, {run['seconds']:.0f} s",
            flush=True,
        )
        runs.append(run)
        STATE.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
        STATE.with_suffix(".md").write_text(report(runs))


def train(job: str) -> dict[str, Any]:
    """Train once; return the losses of the first step and of the final validation."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
        folder = Path(name)
        (folder / "job.toml").write_text(job)
        finished = run_command(
            [
                sys.executable,
                "-m",
                "wanma",
                "train",
                str(folder / "job.toml"),
                "--run-dir",
                str(folder / "run"),
            ],
            dict(os.environ),
            folder / "output.log",
            TIMEOUT_SECONDS,
        )
        metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["kind"] == "validation"][-1]
    return {
        "first": json.loads(metrics[0])["loss"],
        "validation": last["loss"],
        "step": last["step"],
        "seconds": round(finished.seconds, 1),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
    }


def report(runs: list[dict[str, Any]]) -> str:
    """Return all runs as Markdown."""
    whole = {_common(run): run for run in runs if run["method"] == WHOLE}
    if not whole:
        return "Nothing has been measured yet.\n"
    rows = []
    for method, (title, _) in METHODS.items():
        found = [run for run in runs if run["method"] == method and _common(run) in whole]
        if not found:
            continue
        own = [run["validation"] for run in found]
        beside = [whole[_common(run)]["validation"] for run in found]
        ratios = [mine / theirs - 1 for mine, theirs in zip(own, beside, strict=True)]
        rows.append(
            [
                f"`{method}`: {title}" if method != WHOLE else title,
                ", ".join(f"{value:.4f}" for value in own),
                f"{statistics.mean(own):.4f}",
                f"{statistics.mean(own) / statistics.mean(beside) - 1:+.2%}" if method != WHOLE else "",
                f"{max(ratios):+.2%}" if method != WHOLE else "",
            ]
        )
    first = statistics.mean(run["first"] for run in whole.values())
    last = statistics.mean(run["validation"] for run in whole.values())
    steps = ", ".join(f"{step:,}" for step in sorted({run["step"] for run in whole.values()}))
    header = ["gradients", "validation loss by seed", "mean", "beside whole gradients", "worst seed"]
    dates = sorted(run["date"] for run in runs)
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    return (
        "# Loss under gradient compression, local steps and overlapped synchronization\n\n"
        f"Validation loss after {steps} steps; with whole gradients it has fallen from {first:.2f} to "
        f"{last:.2f}. All ways have the same settings. Of what only sites have (a beginning together, rate "
        "and momentum of the outer update) a few values were tried, with the first seed.\n\n"
        f"{table(header, rows)}\n## The job\n\n```toml\n{next(iter(whole.values()))['job']}```\n\n"
        f"## Where and when\n\n- {', '.join(dict.fromkeys(run['machine'] for run in runs))}\n"
        f"- from {dates[0]} to {dates[-1]}\n- wanma at {commits}\n"
    )


def _common(run: dict[str, Any]) -> str:
    """Return the run's job without the lines of its method."""
    own = METHODS[run["method"]][1]
    return "\n".join(line for line in run["job"].splitlines() if line not in own)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--methods", nargs="+", choices=list(METHODS), default=USUAL, help="default: those not at once")
    add("--seeds", type=int, default=3, help="default 3")
    add("--steps", type=int, default=2000, help="default 2000")
    add("--batch", type=int, default=8, help="sequences per step (default 8)")
    add("--sequence", type=int, default=64, help="tokens of a sequence (default 64)")
    add("--minutes", type=float, default=float("inf"), help="start no run after this; run again to carry on")
    add("--report", action="store_true", help="only print the report")
    return parser.parse_args()


if __name__ == "__main__":
    main()
