"""Memory of runs that offload state to disk, beside the forecast.

    python -m benchmarks.planner.offload --write     # two minutes on two cores; docs/results/offload.md

Each run is a command of its own. Other programs may run: they take no memory of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, commit, machine, run_command, table

PAGE = RESULTS / "offload.md"
MIB = 1 << 20
TIMEOUT_SECONDS = 900.0
STEPS, BATCH, SEQUENCE = 3, 4, 128
PRESET = "gpt-60m"
CASES = {
    "nothing": (),
    "optimizer": ("optimizer",),
    "parameters": ("parameters",),
    "activations": ("activations",),
    "all three": ("optimizer", "parameters", "activations"),
}
HEADER = ("offloaded to disk", "forecast, MiB", "measured, MiB", "error", "losses")


class Run(NamedTuple):
    """Outcome of a run."""

    forecast_bytes: float
    memory_bytes: float
    """Peak resident memory of the rank before the last step, which saves a checkpoint."""
    losses: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wanma-offload-") as folder:
        runs = {name: measure(parts, Path(folder)) for name, parts in CASES.items()}
    text = report(runs)
    print(text)
    if options.write:
        PAGE.write_text(text)


def measure(parts: tuple[str, ...], folder: Path) -> Run:
    """Train with these parts offloaded to disk."""
    job, directory = folder / "job.toml", folder / "-".join(("run", *parts))
    job.write_text(job_text(parts, folder))
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GLIBC_", "MKL_"))
    }
    command = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(directory)]
    run_command(command, environment, folder / "output.log", TIMEOUT_SECONDS)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    planned = json.loads((directory / "plan.json").read_text())
    return Run(
        forecast_bytes=planned["forecast"]["memory_bytes"],
        memory_bytes=max(record["memory_bytes"] for record in records[:-1]),
        losses=[record["loss"] for record in records],
    )


def job_text(parts: tuple[str, ...], folder: Path) -> str:
    """Return the job file of a run."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"preset": PRESET},
        "data": {
            "text": [str(Path(__file__).parent)],
            "sequence_length": SEQUENCE,
            "validation_fraction": 0.0,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": STEPS, "global_batch": BATCH},
        "parallel": {f"offload_{part}": "disk" for part in parts} | {"micro_batch": BATCH},
        "checkpoint": {"every_steps": 0, "in_memory_every_steps": "off"},
        "cluster": {"device": "cpu"},
    }
    return "\n".join(
        line
        for name, keys in sections.items()
        for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
    )


def report(runs: dict[str, Run]) -> str:
    """Return the page."""
    losses = runs["nothing"].losses
    rows = [
        (
            name,
            f"{run.forecast_bytes / MIB:,.0f}",
            f"{run.memory_bytes / MIB:,.0f}",
            f"{run.forecast_bytes / run.memory_bytes - 1:+.1%}",
            "equal" if run.losses == losses else "different",
        )
        for name, run in runs.items()
    ]
    return "\n".join(
        [
            "# Memory with state offloaded to disk beside the forecast\n",
            f"Peak resident memory of one process in the first {STEPS - 1} of {STEPS} steps, before a save: "
            f"`{PRESET}`, {BATCH} × {SEQUENCE} tokens, fp32, AdamW. Losses are compared with those of "
            "the run without offload in every digit.\n",
            table(HEADER, rows),
            f"{machine()}; torch {version('torch')}; wanma at {commit()}; {datetime.date.today()}:\n",
            "    python -m benchmarks.planner.offload --write\n",
        ]
    )


if __name__ == "__main__":
    main()
