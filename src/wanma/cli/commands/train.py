"""Command `wanma train JOB`: start or continue a training."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_job_arguments

_EXAMPLES = """\
examples:
  wanma train examples/gpt.toml
  wanma train examples/gpt.toml train.steps=500 parallel.dp_shard=2 train.precision=bf16
  wanma train examples/gpt.toml --dry-run
  wanma train examples/gpt.toml --nodes 2 --rendezvous 10.0.0.1:29500   # the same on each node

After a crash or Ctrl-C the same command resumes from the newest checkpoint.
Ctrl-C completes the step and saves a checkpoint; a second Ctrl-C exits at once. `wanma job` lists all keys.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
        "--rendezvous", metavar="HOST:PORT", help="rendezvous address of the nodes (cluster.rendezvous)"
    )
    parser.add_argument("--node-rank", metavar="R", help="rank of this node (cluster.node_rank)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.job.file.loading import load_job

    job = load_job(arguments.job, [*arguments.overrides, *_cluster_overrides(arguments)])
    # Modules that need torch are imported once the job is valid.
    from wanma.api.run.job_run import dry_run, train_job

    if arguments.dry_run:
        from wanma.cli.output import print_content

        print_content(dry_run(job, arguments.run_dir))
        return 0
    return train_job(job, run_directory=arguments.run_dir, command_line=arguments.command_line)


def _cluster_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return options that are another form of a key as overrides, so that one place checks them."""
    written = {
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
        "checkpoint.resume": "false" if arguments.fresh else None,
    }
    return [f"{key}={value}" for key, value in written.items() if value is not None]
