"""`wanma plan JOB`: how a job would run, who would hold what, and what one rank would do."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_job, complete_with, job_files

_EXAMPLES = """\
examples:
  wanma plan examples/gpt.toml
  wanma plan examples/gpt.toml --explain parallel.tp=2 parallel.pp=2
  wanma plan examples/gpt.toml --cluster "8x8 H100 SXM, 4x100G" parallel=auto
  wanma plan examples/gpt.toml --device "H100 SXM" --rank 700 model.preset=llama-3-405b \\
      parallel.pp=16 parallel.dp_shard=8 parallel.tp=8 train.precision=bf16 train.global_batch=512

--device and --cluster plan for machines that are not here. --rank builds one rank of any layout on this
machine: its tensors have shapes but no memory, and nothing is sent.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="how a job would run, and who holds what", epilog=_EXAMPLES)
    add_job(parser)
    parser.add_argument("--explain", action="store_true", help="show which rank holds what")
    parser.add_argument("--rank", metavar="R", type=int, help="build this rank, and show its collectives")
    parser.add_argument(
        "--device", metavar="NAME", help="as many of the catalogue's 'H100 SXM' as the job has ranks"
    )
    where = parser.add_argument(
        "--cluster", metavar="FILE", help="cluster file, or a line such as '8x8 H100 SXM, 4x100G'"
    )
    complete_with(where, job_files)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
