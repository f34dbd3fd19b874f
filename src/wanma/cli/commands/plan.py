"""`wanma plan JOB`: how a job would run, who would hold what, and what one rank would do."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_job, complete_with, job_files
from wanma.job.errors import JobError

_EXAMPLES = """\
examples:
  wanma plan examples/gpt.toml
  wanma plan examples/gpt.toml --explain parallel.tp=2 parallel.pp=2
  wanma plan --learn runs/gpt                            what this run took corrects the next forecasts
  wanma plan examples/gpt.toml --cluster "8x8 H100 SXM, 4x100G" parallel=auto
  wanma plan examples/gpt.toml --device "H100 SXM" --rank 700 model.preset=llama-3-405b \\
      parallel.pp=16 parallel.dp_shard=8 parallel.tp=8 train.precision=bf16 train.global_batch=512

--device and --cluster plan for machines that are not here. --rank builds one rank of any layout on this
machine: its tensors have shapes but no memory, and nothing is sent.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="how a job would run, and who holds what", epilog=_EXAMPLES)
    add_job(parser, required=False)
    parser.add_argument("--explain", action="store_true", help="show which rank holds what")
    parser.add_argument("--rank", metavar="R", type=int, help="build this rank, and show its collectives")
    parser.add_argument(
        "--device", metavar="NAME", help="as many of the catalogue's 'H100 SXM' as the job has ranks"
    )
    where = parser.add_argument(
        "--cluster", metavar="FILE", help="cluster file, or a line such as '8x8 H100 SXM, 4x100G'"
    )
    complete_with(where, job_files)
    parser.add_argument(
        "--learn", metavar="RUN", type=Path, help="instead of a job: correct forecasts by what this run took"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.learn is not None:
        return _learn(arguments)
    if arguments.job is None:
        raise JobError("wanma plan: JOB is missing", "name a job file, or a run with --learn RUN")
    from wanma.job.load import load_job

    job = load_job(arguments.job, arguments.overrides)
    from wanma.api.plan import plan_job
    from wanma.cli.show import show

    show(
        plan_job(
            job,
            device=arguments.device,
            cluster=arguments.cluster,
            explained=arguments.explain,
            rank=arguments.rank,
        )
    )
    return 0


def _learn(arguments: argparse.Namespace) -> int:
    from wanma.api.learning import learn, learned_table
    from wanma.cli.arguments import run_at
    from wanma.cli.show import show

    if arguments.job is not None:
        raise JobError("--learn takes a run, and no job", f"wanma plan --learn {arguments.learn}")
    show(learned_table(learn(run_at(arguments.learn))))
    return 0
