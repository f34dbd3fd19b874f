"""Command `wanma render JOB --engine NAME`: text of a submission, such as a batch script or manifests."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_job_arguments, override_texts

_EXAMPLES = """\
examples:
  wanma render gpt.toml --engine kubernetes cluster.file="2x8 H100 SXM" > gpt.yaml
  wanma render gpt.toml --engine kubernetes cluster.kubernetes.resource=trainjob
  wanma render gpt.toml --engine slurm --nodes 4
  wanma render gpt.toml --engine skypilot --nodes 2 cluster.file="2x8 H100 SXM, 8x400G" > gpt.sky.yaml

No scheduler is asked: the plan is made for cluster.file, else for nodes like this machine.
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "render", help="print what a submission to an engine would submit", epilog=_EXAMPLES
    )
    add_job_arguments(parser)
    parser.add_argument("--engine", metavar="NAME", help="place of the run (cluster.engine), or skypilot")
    parser.add_argument("--nodes", metavar="N", help="number of nodes, or a range: 2..8 (cluster.nodes)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/NAME")
    parser.add_argument(
        "--rbac", action="store_true", help="of Kubernetes: print the rights that a submission needs, instead"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.submission import render_job, render_skypilot_job
    from wanma.data.data_kinds import with_data_kinds
    from wanma.job.file.loading import load_job

    options = {"cluster.engine": arguments.engine, "cluster.nodes": arguments.nodes}
    is_skypilot = arguments.engine == "skypilot"
    if is_skypilot:  # no engine of a run: it starts the nodes, and each starts wanma
        options |= {"cluster.engine": "local", "cluster.rendezvous": "skypilot:1"}
    job = with_data_kinds(load_job(arguments.job, [*arguments.overrides, *override_texts(options)]))
    if is_skypilot:
        print(render_skypilot_job(job, arguments.run_dir), end="")
        return 0
    if arguments.rbac:
        from wanma.engines.kubernetes.manifests import read_rbac

        print(read_rbac(), end="")
        return 0
    print(render_job(job, arguments.run_dir), end="")
    return 0
