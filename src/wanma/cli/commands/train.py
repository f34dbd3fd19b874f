"""Command `wanma train JOB`: start or continue a training."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import (
    add_engine_options,
    add_job_arguments,
    add_rendezvous_options,
    override_texts,
)
from wanma.cli.output import print_submitted
from wanma.engines.launchers.launcher_placement import LauncherPlacement, may_be_launched

if TYPE_CHECKING:
    from wanma.elastic.workers.fork_server_handle import ForkServerHandle
    from wanma.job.sections.job import Job

_EXAMPLES = """\
examples:
  wanma train gpt.toml                                        # an example: `wanma init gpt` writes it
  wanma train gpt.toml train.steps=500 parallel.dp_shard=2 train.precision=bf16
  wanma train gpt.toml --dry-run
  wanma train gpt.toml --nodes 2 --rendezvous 10.0.0.1:29500  # the same on each node
  wanma train gpt.toml --engine slurm --nodes 8               # once, on a login node
  mpirun -n 4 wanma train gpt.toml                            # or srun, torchrun -m: nodes, ranks are theirs
  wanma train gpt.toml --engine ssh --nodes 3                 # once, anywhere: hosts of cluster.ssh

After a crash or Ctrl-C the same command resumes from the newest checkpoint.
Ctrl-C completes the step and saves a checkpoint; a second Ctrl-C exits at once. `wanma job` lists all keys.
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("train", help="train a job, or resume it", epilog=_EXAMPLES)
    add_job_arguments(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/NAME")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the job and show its plan; start nothing"
    )
    parser.add_argument("--fresh", action="store_true", help="start from step 0 (checkpoint.resume=false)")
    parser.add_argument(
        "--nodes",
        metavar="N",
        help="number of nodes, or a range: 2..8; run the same command on each (cluster.nodes)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="PORT",
        help="port of the metrics for Prometheus; 0: any that is free (observe.metrics_port)",
    )
    add_engine_options(parser)
    add_rendezvous_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with _early_fork_server(arguments) as fork_server:
        from wanma.engines.launchers.node_leader import run_on_node
        from wanma.engines.launchers.placement import read_placement

        placement = read_placement()
        return run_on_node(placement, lambda: _train(arguments, placement, fork_server))


def _early_fork_server(arguments: argparse.Namespace) -> AbstractContextManager[ForkServerHandle | None]:
    """Start the fork server before this process imports, plans and reads, where the run is likely to be here.

    Other launchers and engines choose cores and code for their processes, which must come first.
    """
    is_elsewhere = arguments.dry_run or arguments.detach or arguments.engine not in (None, "local")
    if is_elsewhere or may_be_launched(os.environ):
        return nullcontext()
    from wanma.elastic.workers.environment import early_worker_environment
    from wanma.elastic.workers.fork_server_handle import ForkServerHandle

    modules = ("torch", "wanma.training.loop.train_worker")
    return ForkServerHandle.start(modules, early_worker_environment(), is_complete=False)


def _train(
    arguments: argparse.Namespace,
    placement: LauncherPlacement | None,
    fork_server: ForkServerHandle | None,
) -> int:
    from wanma.data.data_kinds import with_data_kinds
    from wanma.elastic.supervisor.stop_signals import stop_exit_code
    from wanma.engines.engine import CODE_ARCHIVE_VARIABLE
    from wanma.engines.launchers.job_placement import launched_world_size, place_job
    from wanma.job.file.loading import load_job

    if CODE_ARCHIVE_VARIABLE in os.environ:
        from wanma.api.engines.placing import enter_code_snapshot

        enter_code_snapshot()
    job = with_data_kinds(load_job(arguments.job, [*arguments.overrides, *_option_overrides(arguments)]))
    world_size = None
    if placement is not None:
        job = place_job(job, placement)
        world_size = launched_world_size(job.cluster, placement)
    with stop_exit_code(job.cluster.requeue_exit_code):
        return _start(job, arguments, placement, world_size, fork_server)


def _start(
    job: Job,
    arguments: argparse.Namespace,
    placement: LauncherPlacement | None,
    world_size: int | None,
    fork_server: ForkServerHandle | None,
) -> int:
    """Train the valid job here, or submit it; modules that need torch are imported from here on."""
    from wanma.api.engines.placing import is_placed
    from wanma.engines.launchers.job_placement import reject_detach

    reject_detach(arguments.detach, placement)
    is_started = placement is not None or is_placed(job.cluster)
    if (job.cluster.engine != "local" or arguments.detach) and not is_started:
        if fork_server is not None:
            fork_server.close()
        return _submit(job, arguments)
    from wanma.api.run.job_run import dry_run, train_job

    if arguments.dry_run:
        from wanma.cli.output import print_content

        print_content(dry_run(job, arguments.run_dir, world_size))
        return 0
    if job.cluster.environment is not None and not is_started:
        note = "cluster.environment is for submitted runs (-d, --engine): this one uses the packages of"
        print(f"{note} {sys.executable}", file=sys.stderr)
    return train_job(
        job,
        run_directory=arguments.run_dir,
        command_line=arguments.command_line,
        world_size=world_size,
        fork_server=fork_server,
    )


def _submit(job: Job, arguments: argparse.Namespace) -> int:
    """Submit the job to its engine and, unless it is to be detached, show it until it ends."""
    from wanma.api.engines.attachment import attach
    from wanma.api.engines.submission import dry_submission, submit_job
    from wanma.engines.selection import get_engine

    if arguments.dry_run:
        from wanma.cli.output import print_content

        print_content(dry_submission(job, arguments.run_dir))
        return 0
    engine = get_engine(job.cluster.engine)
    is_held = engine.ends_with_caller and not arguments.detach
    run, record = submit_job(job, arguments.run_dir, engine=engine, is_held=is_held)
    if not arguments.detach:
        return attach(run, record, from_start=False, engine=engine, is_held=is_held)
    print_submitted(run, record.notes)
    return 0


def _option_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the options that are another form of a key as overrides."""
    written = {
        "cluster.engine": arguments.engine,
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
        "checkpoint.resume": "false" if arguments.fresh else None,
        "observe.metrics_port": arguments.metrics_port,
    }
    return override_texts(written)
