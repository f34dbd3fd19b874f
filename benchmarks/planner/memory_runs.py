"""Memory forecasts beside the peaks of real runs on this node's processors.

    python -m benchmarks.planner.memory_runs --runs 3     # three that are not measured yet; again to carry on
    python -m benchmarks.planner.memory_runs              # only the report

State is in docs/results/planner-memory-runs.json, the report a section of planner-memory.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import RESULTS, machine, run_command
from benchmarks.planner.memory import RUNS_HEADING
from wanma.job.plan.plan import Plan
from wanma.job.sections.model import ModelSection
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.memory.peak import CPU_RUNTIME_BYTES, pipeline_rank_memory

STATE = RESULTS / "planner-memory-runs.json"
SEQUENCE, BATCH, STEPS = 256, 8, 4
"""Length, batch and steps of a run; a process grows until the third step, and the last one saves."""
TIMEOUT_SECONDS = 300.0
MIB = 1 << 20

MODELS: dict[str, dict[str, Any]] = {
    "deep": {"family": "decoder", "layers": 8, "hidden": 512, "heads": 8, "vocabulary": 8192},
    "wide": {
        "family": "decoder",
        "layers": 6,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 4,
        "vocabulary": 32000,
    },
}


class Run(NamedTuple):
    """Run whose memory is measured: model, lines of `[parallel]`, and precision."""

    model: str
    parallel: dict[str, Any]
    precision: str = "fp32"
    is_fitted: bool = True
    """True if the heap's allowance was chosen by it."""

    @property
    def name(self) -> str:
        sizes = " ".join(f"{key} {value}" for key, value in self.parallel.items())
        return f"{self.model}, {sizes}, {self.precision}"


GLOO = {"collectives": "gloo"}
"""Setting of ranks without a C++ compiler, which exchange tensors by Gloo."""

RUNS = (
    Run("deep", {"micro_batch": 8}),
    Run("deep", {"micro_batch": 2}),
    Run("deep", {"micro_batch": 8, "recompute": "full"}),
    Run("wide", {"micro_batch": 4}),
    Run("deep", {"dp_replicate": 2, "micro_batch": 4}),
    Run("deep", {"dp_shard": 2, "micro_batch": 2}),
    Run("wide", {"tp": 2, "micro_batch": 8}),
    Run("wide", {"pp": 2, "micro_batch": 1}),
    Run("deep", {"dp_shard": 4, "micro_batch": 2}),
    Run("wide", {"tp": 2, "dp_shard": 2, "micro_batch": 2}),
    Run("deep", {"pp": 2, "dp_replicate": 2, "micro_batch": 1}),
    Run("wide", {"cp": 2, "dp_replicate": 2, "micro_batch": 4}),
    Run("deep", {"micro_batch": 8}, "bf16", is_fitted=False),
    Run("wide", {"micro_batch": 2, "recompute": "selective"}, is_fitted=False),
    Run("wide", {"dp_shard": 2, "shard": "optimizer", "micro_batch": 2}, is_fitted=False),
    Run("deep", {"tp": 2, "micro_batch": 8}, is_fitted=False),
    Run("wide", {"pp": 4, "micro_batch": 1}, is_fitted=False),
    Run("deep", {"dp_replicate": 4, "micro_batch": 2}, is_fitted=False),
    Run("wide", {"dp_shard": 2, "shard": "gradients", "micro_batch": 2}, "bf16", is_fitted=False),
    Run("wide", {"micro_batch": 2}, "bf16", is_fitted=False),
    Run("deep", {"dp_shard": 2, "shard": "optimizer", "micro_batch": 4}, "bf16", is_fitted=False),
    Run("deep", {"dp_shard": 2, "micro_batch": 2, **GLOO}, is_fitted=False),
    Run("wide", {"dp_shard": 2, "shard": "optimizer", "micro_batch": 2, **GLOO}, is_fitted=False),
    Run("wide", {"dp_shard": 2, "shard": "gradients", "micro_batch": 2, **GLOO}, "bf16", is_fitted=False),
    Run("wide", {"tp": 2, "micro_batch": 8, **GLOO}, is_fitted=False),
    Run("deep", {"dp_replicate": 4, "micro_batch": 2, **GLOO}, is_fitted=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=0, help="most runs to measure now")
    left = parser.parse_args().runs
    state: dict[str, Any] = json.loads(STATE.read_text()) if STATE.exists() else {}
    with tempfile.TemporaryDirectory(prefix="wanma-memory-cache-") as cache:
        for run in RUNS:
            if left > 0 and run.name not in state:
                state[run.name] = _measure(run, cache)
                STATE.write_text(json.dumps(state, indent=1) + "\n")
                left -= 1
    text = report(state)
    print(text)
    path = RESULTS / "planner-memory.md"
    before = path.read_text().partition(RUNS_HEADING)[0].rstrip() if path.exists() else ""
    path.write_text(f"{before}\n\n{text}")


def _measure(run: Run, cache: str) -> dict[str, Any]:
    """Return the plan that ran, and the peak of rank 0's resident memory in bytes.

    Args:
        cache: folder of tokens, for all runs.
    """
    with tempfile.TemporaryDirectory(prefix="wanma-memory-") as folder:
        sections: dict[str, dict[str, Any]] = {
            "model": MODELS[run.model],
            "data": {
                "text": [str(Path(__file__).parent)],
                "sequence_length": SEQUENCE,
                "validation_fraction": 0.0,
                "cache": cache,
            },
            "train": {"steps": STEPS, "global_batch": BATCH, "precision": run.precision},
            "parallel": run.parallel,
            # What a snapshot holds is counted apart, and resident memory counts its pages in every rank.
            "checkpoint": {"every_steps": 0, "in_memory_every_steps": "off"},
            "cluster": {"device": "cpu"},
        }
        lines = [
            line
            for name, keys in sections.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
        ]
        job, directory = Path(folder) / "job.toml", Path(folder) / "run"
        job.write_text("\n".join(lines) + "\n")
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GLIBC_", "MKL_"))
        }
        command = [sys.executable, "-m", "wanma", "train", str(job), "--run-dir", str(directory)]
        run_command(command, environment, Path(folder) / "output.log", TIMEOUT_SECONDS)
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        planned = json.loads((directory / "plan.json").read_text())
    peak = max(record["memory_bytes"] for record in records[:-1])
    return {"plan": planned["plan"], "memory_bytes": peak, "machine": machine()}


def report(state: dict[str, Any]) -> str:
    lines = [
        RUNS_HEADING,
        "",
        f"Peak resident memory of rank 0 in {STEPS - 1} steps, in MiB, before anything is saved. `tensors`:",
        f"of the forecast, what torch allocates; the rest: Python and torch ({CPU_RUNTIME_BYTES / MIB:.0f})",
        "and the heap's holes. The same run again differs by up to 4 %: where a hole is a few bytes too",
        "small, the heap grows by the whole tensor.",
        "",
        "| run | | measured | forecast | error | tensors |",
        "|---|---|---|---|---|---|",
    ]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for run in RUNS:
        if run.name not in state:
            continue
        measured, plan = state[run.name]["memory_bytes"], Plan.from_json(state[run.name]["plan"])
        section = ModelSection(**MODELS[run.model])
        workload = build_section_workload(
            section, vocabulary_size=None, sequence_length=SEQUENCE, image_shape=None, classes=None
        )
        assert workload is not None
        forecast = pipeline_rank_memory(
            workload,
            plan,
            "adamw",
            micro_batches=plan.gradient_accumulation_steps(BATCH),
            dimensions=resolve_section_decoder_config(section, None),
            framework=FrameworkTraits(
                fuses_pointwise=plan.compile,
                shared_memory_nodes=int(run.parallel.get("collectives") != "gloo"),
                logits_copies=1.0,  # as of every decoder of ours: `planner.problem`
            ),
        )[0].forecast
        error = forecast.memory_bytes / measured - 1
        errors[run.is_fitted].append(error)
        mark = "fitted" if run.is_fitted else "checked"
        lines.append(
            f"| {run.name} | {mark} | {measured / MIB:.0f} | {forecast.memory_bytes / MIB:.0f} "
            f"| {error:+.1%} | {forecast.tensor_bytes / MIB:.0f} |"
        )
    for which, found in (("fitted", errors[True]), ("checked", errors[False])):
        if found:
            mean = statistics.mean(map(abs, found))
            lines.append(
                f"| mean error | {which} | | | {mean:.1%}, {min(found):+.1%} to {max(found):+.1%} | |"
            )
    machines = {json.dumps(entry["machine"], sort_keys=True) for entry in state.values()}
    lines += ["", *(f"Machine: {text}" for text in sorted(machines)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
