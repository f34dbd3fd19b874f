"""Seconds from the command to the end of the first step on Ray: `wanma train --engine ray` beside Ray Train.

    make ray && .venv/bin/python -m pip --python .venv-ray/bin/python install 'ray[train]==2.60.0'
    python benchmarks/ray/run.py --pairs 3
    python benchmarks/ray/run.py --report

The cluster is real Ray: two nodes of one CPU each on this machine, the same for all pairs. Both contenders
train the same tiny PyTorch module on the same tokens, with one rank on each node. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # the cluster of the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (
    ROOT,
    BenchmarkError,
    Results,
    busy_cpus,
    clean_environment,
    common_parser,
    describe_environments,
    machine,
    ratios,
    sample_values,
    table,
    take_pairs,
    undisturbed,
)
from benchmarks.startup.run import prepare_inputs
from support.ray_cluster import (  # type: ignore[import-not-found]
    PYTHON,
    RayCluster,
    ray_cluster,
)
from wanma.bench.statistics.estimates import estimate

RANKS = 2
RAY_VERSION = "2.60.0"
TIMEOUT_SECONDS = 200.0
QUIET_SECONDS = 1.0
"""Seconds before a sample in which the CPU time of others is measured; the daemons of Ray are part of it."""


def main() -> None:
    parser = common_parser(__doc__ or "", "ray")
    parser.set_defaults(venv=PYTHON.parents[1])
    options = parser.parse_args()
    if options.report:
        print(report(Results(options.results).pieces))
    elif not PYTHON.exists():
        sys.exit("error: the environment is that of `make ray`")
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    """Measure pairs on one cluster."""
    results = Results(options.results)
    piece = results.piece({"ranks": RANKS}, options.fresh)
    versions = {package: importlib.metadata.version(package) for package in ("torch", "numpy")}
    piece["environment"] = {"machine": machine(), "versions": {"ray": RAY_VERSION, **versions}}
    os.environ |= clean_environment(options.venv)  # the workers of Ray have that of its nodes
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name, ray_cluster() as cluster:
        prepare_inputs(Path(name), RANKS)
        contenders = {
            who: partial(measure, who, cluster, Path(name), options.venv) for who in ("wanma", "peer")
        }
        for warm in contenders.values():
            warm()
        take_pairs(
            piece,
            contenders,
            options,
            save=lambda: results.save(report(results.pieces)),
        )


def measure(who: str, cluster: RayCluster, inputs: Path, venv: Path) -> dict[str, Any]:
    """Run one contender once, to its end; raises `BenchmarkError` if it fails."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as temporary:
        folder, python = Path(temporary), str(venv / "bin" / "python")
        if who == "wanma":
            command = [
                python,
                "-m",
                "wanma",
                "train",
                str(inputs / "job.toml"),
                "--engine",
                "ray",
                "--nodes",
                "2",
            ]
            command += ["--run-dir", str(folder / "run"), f"cluster.ray.address={cluster.address}"]
            command += ["cluster.code_snapshot=false", "cluster.device=cpu"]
        else:
            command = [python, "benchmarks/ray/train_loop.py", "--address", cluster.address]
            command += ["--tokens", str(inputs / "tokens.npy"), "--record", str(folder / "record.json")]
            command += ["--storage", str(folder / "storage")]
        foreign, started = busy_cpus(QUIET_SECONDS), time.time()
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=clean_environment(venv),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise BenchmarkError(f"{who} ended with code {done.returncode}: {done.stdout.decode()[-3000:]}")
        record = folder / ("run/metrics.jsonl" if who == "wanma" else "record.json")
        first = json.loads(record.read_text().splitlines()[0])
        cluster.assert_nothing_is_left(folder)
    seconds = first["time"] - started
    print(f"  {who}: {seconds:.2f} s to the end of step 1, loss {first['loss']:.6f}", flush=True)
    return {
        "seconds": round(seconds, 3),
        "loss": first["loss"],
        "foreign_cpu": round(foreign, 3),
    }


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return all results as Markdown."""
    rows = []
    for piece in (piece for piece in pieces if undisturbed(piece)):
        seconds = [estimate(sample_values(piece, who, "seconds")).median for who in ("wanma", "peer")]
        ratio = estimate(ratios(piece, metric="seconds"))
        rows.append([*(f"{value:.2f}" for value in seconds), str(ratio), str(len(undisturbed(piece)))])
    if not rows:
        return "Nothing has been measured yet.\n"
    header = ["wanma, s", "Ray Train, s", "ratio (95 %)", "pairs"]
    return "\n".join(
        [
            "# Start-up on Ray: from the command to the end of the first step\n",
            "Two nodes of one CPU each on one machine, one rank on each. Ratio: wanma's seconds over Ray "
            "Train's, median of the pairs with its 95 % bootstrap interval.\n",
            table(header, rows),
            "    python benchmarks/ray/run.py --pairs 4\n",
            "## Where and when\n",
            describe_environments(pieces),
            "",
        ]
    )


if __name__ == "__main__":
    main()
