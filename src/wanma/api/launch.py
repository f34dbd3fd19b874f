"""`wanma launch SCRIPT`: a user's own script on several ranks, under the supervisor."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from wanma.elastic.environment import worker_environment
from wanma.elastic.launch import Launch
from wanma.elastic.node import Node
from wanma.engines.local import run as run_local
from wanma.hardware.discover import discover
from wanma.job.plan import Plan
from wanma.job.run_directory import RunDirectory
from wanma.job.sections import ClusterSection, ObserveSection
from wanma.job.worker import Worker, current_worker
from wanma.observe.console import open_console

PRELOAD = ("torch", "torch._dynamo", "wanma.api.session", "wanma.training.session")


def launch_script(script: Path, arguments: list[str], ranks: int, run_directory: Path | None = None) -> int:
    """Run `script` once per rank; its `wanma.session` finds its rank by itself.

    Args:
        run_directory: default: runs / the script's name.

    Returns:
        the exit code, as of `train_job`.
    """
    run = RunDirectory((run_directory or Path("runs") / script.stem).absolute())
    run.create()
    cluster = discover()
    has_gpu = any(node.devices for node in cluster.nodes)
    threads = max(cluster.nodes[0].cores // ranks, 1)
    plan = Plan(dp_replicate=ranks, threads_per_rank=threads, device="cuda" if has_gpu else "cpu")
    environment = worker_environment(ClusterSection(), plan)
    launch = Launch(
        run_directory=run.path,
        entry="wanma.api.launch:run_script",
        payload=json.dumps([str(script.absolute()), arguments]).encode(),
        preload=PRELOAD,
        ranks_per_node=ranks,
        threads_per_rank=threads,
        environment=environment,
    )
    node = Node.start(PRELOAD, environment)
    with open_console(run, ObserveSection(), steps=0) as console:
        outcome = run_local(launch, console.write, node)
        if outcome.failure is not None:
            console.write({"kind": "message", "level": "error", "text": outcome.message})
    return outcome.exit_code


def run_script(worker: Worker, payload: bytes) -> None:
    """Entry of each rank: the script as `__main__`, with its own arguments and folder."""
    script, arguments = json.loads(payload)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    current_worker.set(worker)
    # The names that scripts for torchrun read.
    os.environ.update(
        RANK=str(worker.rank), LOCAL_RANK=str(worker.local_rank), WORLD_SIZE=str(worker.world_size)
    )
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise RuntimeError(f"{script} left with exit code {leaving.code}") from leaving
