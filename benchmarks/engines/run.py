"""Runs on Slurm: `wanma train --engine slurm` beside a batch script with srun and torchrun.

    python benchmarks/engines/run.py --part start        # seconds from the command to the first step's end
    python benchmarks/engines/run.py --part recovery     # seconds from a node's loss to the next step's end
    python benchmarks/engines/run.py --part scale        # 1,000 runs in the queue, 10,000 nodes
    python benchmarks/engines/run.py --report

The cluster is real Slurm: a controller, and three nodes in network namespaces of this machine (root, packages
slurm-wlm, munge and iproute2). Both contenders train the same tiny PyTorch module on two nodes with one rank
each. A loss kills every process of a node at once, its slurmd included. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
    carry_out,
    clean_environment,
    common_parser,
    describe_environment,
    describe_environments,
    ratios,
    sample_values,
    table,
    take_pairs,
    undisturbed,
)
from benchmarks.startup.run import job, prepare_inputs
from support.slurm import SlurmCluster, slurm_cluster  # type: ignore[import-not-found]
from wanma.bench.statistics.estimates import estimate

NODES = 2
TIMEOUT_SECONDS = 400.0
QUIET_SECONDS = 1.0
"""Seconds before a sample in which the CPU time of others is measured: nothing of the cluster runs then."""
STEPS = {"start": 2, "recovery": 100_000}
BATCH_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=peer --nodes={nodes} --exclusive --requeue --open-mode=append --output={folder}/peer.log
cd {root}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --ntasks-per-node=1 --cpu-bind=none {torchrun} --nnodes={nodes} --nproc-per-node=1 --max-restarts=3 \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\
    --rdzv-endpoint="$first:$((20000 + SLURM_JOB_ID % 10000))" \\
    benchmarks/startup/train_ddp.py --tokens {folder}/tokens.npy --record {folder}/record.jsonl \\
    --checkpoint {folder}/checkpoint.pt --steps {steps}
"""
SCALE_NODES, SCALE_RUNS = 10_000, 1_000


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen part that lacks rounds."""
    results = Results(options.results)
    environment = describe_environment(options.venv)
    for part in [options.part] if options.part else ["start", "recovery", "scale"]:
        piece = results.piece({"part": part}, options.fresh)
        piece["environment"] = environment
        if part == "scale":
            piece["scale"] = measure_scale(options.venv)
            results.save(report(results.pieces))
            continue
        contenders = {who: partial(measure, who, part, options.venv) for who in ("wanma", "peer")}
        if not take_pairs(
            piece,
            contenders,
            options,
            save=lambda: results.save(report(results.pieces)),
        ):
            return


def measure(who: str, part: str, venv: Path) -> dict[str, Any]:
    """Run one contender once, on a new cluster: Slurm takes a node that was lost and is back for lost again.

    Raises:
        BenchmarkError: it did not reach its step in time, or did not start on two nodes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="wanma-bench-") as name,
        slurm_cluster(Path(name), nodes=3) as cluster,
    ):
        return measure_on(cluster, who, part, venv)


def measure_on(cluster: SlurmCluster, who: str, part: str, venv: Path) -> dict[str, Any]:
    """Run one contender once on a cluster."""
    foreign = busy_cpus(QUIET_SECONDS)
    environment = {**clean_environment(venv), "SLURM_CONF": cluster.environment["SLURM_CONF"]}
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
        folder = Path(name)
        prepare_inputs(folder, NODES)
        started = time.time()
        if who == "wanma":
            record, read_job = folder / "run" / "metrics.jsonl", partial(wanma_job, folder)
            text = job(NODES, str(folder / "corpus.txt"), str(folder / "cache"))
            (folder / "job.toml").write_text(text.replace("steps = 2\n", f"steps = {STEPS[part]}\n"))
            size = "1..2" if part == "recovery" else "2"
            command = ["wanma", "train", str(folder / "job.toml"), "--run-dir", str(folder / "run")]
            command += ["--engine", "slurm", "--nodes", size, "-d"]
            command[0] = str(venv / "bin" / "wanma")
        else:
            record, read_job = folder / "record.jsonl", partial(peer_job, folder)
            script = BATCH_SCRIPT.format(
                nodes=NODES, folder=folder, root=ROOT, torchrun=venv / "bin" / "torchrun", steps=STEPS[part]
            )
            (folder / "peer.sh").write_text(script)
            command = ["sbatch", "--parsable", str(folder / "peer.sh")]
        submitted = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            capture_output=True,
            text=True,
            check=False,
        )
        if submitted.returncode != 0:
            raise BenchmarkError(f"{shlex.join(command)}: {submitted.stdout}{submitted.stderr}")
        (folder / "submitted").write_text(submitted.stdout)
        try:
            if part == "start":
                seconds = wait_for_step(record, lambda _: True, folder) - started
            else:
                wait_for_step(record, lambda step: step["step"] >= 25, folder)
                if who == "wanma":
                    check_nodes(folder / "run" / "events.jsonl")
                cluster.kill_node(second_node(cluster, read_job()))
                lost = time.time()  # since then every process of the node is gone
                seconds = wait_for_step(record, lambda step: step["time"] > lost + 0.2, folder) - lost
        finally:
            subprocess.run(["scancel", "--user=root"], env=environment, check=False)
            cluster.wait_for(lambda: not cluster.run("squeue", "--noheader"), "the end of all jobs")
            time.sleep(1)  # processes of a lost node's job write no more
    print(f"  {who}, {part}: {seconds:.2f} s", flush=True)
    return {"seconds": round(seconds, 3), "foreign_cpu": round(foreign, 3)}


def check_nodes(events: Path) -> None:
    """Refuse a run that could have started on one node, as torchrun could not."""
    starts = [event for event in map(json.loads, events.read_text().splitlines()) if event["kind"] == "start"]
    if [start["nodes"] for start in starts] != [NODES]:
        raise BenchmarkError(f"wanma did not start once on {NODES} nodes: {starts}")


def wanma_job(folder: Path) -> str:
    return str(json.loads((folder / "run" / "engine.json").read_text())["handle"]["jobs"][0])


def peer_job(folder: Path) -> str:
    return (folder / "submitted").read_text().split(";")[0].strip()


def second_node(cluster: SlurmCluster, number: str) -> str:
    """Return the node of the job that has neither rank 0 nor the batch script."""
    text = cluster.run("scontrol", "show", "hostnames", cluster.job(number)["NodeList"])
    return str(text.split()[1])


def wait_for_step(record: Path, accepts: Callable[[dict[str, Any]], bool], folder: Path) -> float:
    """Return the Unix time of the end of the first recorded step that `accepts` takes."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        lines = record.read_text().splitlines() if record.exists() else []
        for line in lines:
            try:
                step = json.loads(line)
            except ValueError:
                continue
            if accepts(step):
                return float(step["time"])
        time.sleep(0.02)
    logs = [path.read_text()[-2000:] for path in folder.rglob("*.log")]
    raise BenchmarkError(f"no such step within {TIMEOUT_SECONDS:.0f} s\n" + "\n".join(logs))


def measure_scale(venv: Path) -> dict[str, float]:
    """Return the seconds of status and discovery with recorded answers of a large cluster."""
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
        folder = Path(name)
        node = (
            "NodeName=g{0} Arch=x86_64 CoresPerSocket=48 CPUAlloc={1} CPUEfctv=192 CPUTot=192 CPULoad=0.04 "
            "AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:h100:8(S:0-1) NodeAddr=g{0} "
            "NodeHostName=g{0} Version=23.11.4 OS=Linux 5.15.0-91-generic #101-Ubuntu SMP RealMemory=2000000 "
            "AllocMem=0 FreeMem=1990000 Sockets=2 Boards=1 State={2} ThreadsPerCore=2 TmpDisk=0 Weight=1 "
            "Partitions=gpu BootTime=2026-11-01T10:00:00 CfgTRES=cpu=192,mem=2000000M,billing=192,gres/gpu=8"
        )
        nodes = "\n".join(
            node.format(number, 192 * (number % 2), ("IDLE", "ALLOCATED")[number % 2])
            for number in range(SCALE_NODES)
        )
        queue = "\n".join(f"{number}|{number}|PENDING||Priority" for number in range(SCALE_RUNS))
        partition = "PartitionName=gpu Default=YES MaxNodes=UNLIMITED Nodes=g[0-9999]"
        for name, text in {"node": nodes, "partition": partition, "squeue": queue}.items():
            (folder / name).write_text(text + "\n")
        (folder / "scontrol").write_text(f'#!/bin/sh\n[ "$1" = ping ] && exit 0\ncat {folder}/"$2"\n')
        (folder / "squeue").rename(folder / "squeue.txt")
        (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/squeue.txt\n")
        for program in ("scontrol", "squeue"):
            (folder / program).chmod(0o755)
        script = (
            "import json, time\n"
            "from wanma.engines.slurm.engine import SlurmEngine\n"
            "from wanma.job.sections.cluster import ClusterSection\n"
            "engine, section = SlurmEngine(), ClusterSection(engine='slurm')\n"
            "began = time.perf_counter(); found = engine.discover(section)\n"
            "middle = time.perf_counter()\n"
            f"handles = [{{'jobs': [str(n)], 'run_directory': '/'}} for n in range({SCALE_RUNS})]\n"
            "states = engine.statuses(handles)\n"
            "end = time.perf_counter()\n"
            f"assert found.max_nodes == {SCALE_NODES} and {{s.state for s in states}} == {{'pending'}}\n"
            "print(json.dumps({'discover': middle - began, 'status': end - middle}))\n"
        )
        path = f"{folder}:{os.environ['PATH']}"
        samples = [
            json.loads(
                subprocess.run(
                    [str(venv / "bin" / "python"), "-c", script],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")},
                ).stdout
            )
            for _ in range(5)
        ]
    return {key: round(min(sample[key] for sample in samples), 3) for key in ("discover", "status")}


TITLES = {
    "start": "from the command to the end of the first step",
    "recovery": "from the loss of one of two nodes to the end of the next step",
}


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return all results as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    scale = next((piece["scale"] for piece in pieces if "scale" in piece), None)
    if not measured and scale is None:
        return "Nothing has been measured yet.\n"
    parts = ["# Runs on Slurm, beside a batch script with srun and torchrun\n"]
    if measured:
        rows = []
        for piece in measured:
            medians = [estimate(sample_values(piece, who, "seconds")).median for who in ("wanma", "peer")]
            rows.append(
                [
                    TITLES[piece["settings"]["part"]],
                    *(f"{value:.2f}" for value in medians),
                    str(estimate(ratios(piece, metric="seconds"))),
                    str(len(undisturbed(piece))),
                ]
            )
        parts += [
            "Ratio: wanma's seconds over the batch script's, median of the pairs with its 95 % bootstrap "
            "interval. After the loss wanma runs on one node from in-memory checkpoints (`--nodes 1..2`) and "
            "asks Slurm for another; the batch script is requeued by Slurm, which notices the loss after "
            "`SlurmdTimeout` (15 s here, 300 s by default) and waits two minutes before a requeued job.\n",
            table(["seconds", "wanma", "sbatch, srun, torchrun", "ratio (95 %)", "pairs"], rows),
        ]
    if scale is not None:
        parts += [
            "## Large clusters\n",
            f"With recorded answers of Slurm, best of five: discovery of {SCALE_NODES:,} nodes takes "
            f"{scale['discover']:.2f} s, the state of {SCALE_RUNS:,} runs {scale['status']:.2f} s.\n",
        ]
    described = [piece for piece in pieces if "environment" in piece and piece.get("pairs")]
    return "\n".join([*parts, "## Where and when\n", describe_environments(described)])


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "engines")
    parser.add_argument("--part", choices=["start", "recovery", "scale"], help="default: all")
    return parser.parse_args()


if __name__ == "__main__":
    main()
