"""Command `wanma plan JOB`: plan of a job, its forecast, the reasons for it, and alternatives."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import (
    add_job_arguments,
    add_json_option,
    complete_job_files,
    override_texts,
    set_completer,
)
from wanma.job.errors import JobError

if TYPE_CHECKING:
    from wanma.planner.presentation.plan_analysis import PlanAnalysis

_EXAMPLES = """\
examples:
  wanma plan gpt.toml
  wanma plan gpt.toml --explain parallel.tp=2 parallel.pp=2
  wanma plan --learn runs/gpt                            # correct later forecasts by this run
  wanma plan gpt.toml --cluster "8x8 H100 SXM, 4x100G" parallel=auto
  wanma plan JOB.toml --engine kubernetes parallel=auto  # for the nodes that are there
  wanma plan JOB.toml --cluster cluster.toml parallel=auto --why tp=16,pp=2
  wanma plan JOB.toml --cluster cluster.toml parallel=auto --what-if gpus=512 --what-if device=H200
  wanma plan JOB.toml --cluster cluster.toml parallel=auto --scale 64..4096 --html plan.html
  wanma plan gpt.toml --device "H100 SXM" --rank 700 model.preset=llama-3-405b \\
      parallel.pp=16 parallel.dp_shard=8 parallel.tp=8 train.precision=bf16 train.global_batch=512

--what-if changes gpus, nodes, device, memory (40GB), link.intra_node (450GB) or link.inter_node (8x400G),
several at once separated by commas. --device and --cluster plan for nodes that need not exist. --rank builds
one rank of any layout on this node: its tensors have shapes but no memory, and nothing is sent.
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan", help="plan a job: layout, forecast time and memory, alternatives", epilog=_EXAMPLES
    )
    add_job_arguments(parser, is_required=False)
    parser.add_argument("--explain", action="store_true", help="show the shards of each rank")
    parser.add_argument(
        "--rank", metavar="R", type=int, help="build rank R without memory, and show its collectives"
    )
    parser.add_argument(
        "--device", metavar="NAME", help="device of the catalogue, e.g. 'H100 SXM'; as many as ranks"
    )
    argument = parser.add_argument(
        "--cluster", metavar="FILE", help="cluster file, or a line such as '8x8 H100 SXM, 4x100G'"
    )
    set_completer(argument, complete_job_files)
    parser.add_argument(
        "--engine", metavar="NAME", help="plan for the nodes that this engine has (cluster.engine)"
    )
    parser.add_argument(
        "--learn", metavar="RUN", type=Path, help="instead of JOB: correct later forecasts by this run"
    )
    analysis = parser.add_argument_group("analysis")
    analysis.add_argument(
        "--why",
        metavar="SIZES",
        action="append",
        default=[],
        help="why another plan was not chosen, e.g. tp=16,pp=2",
    )
    analysis.add_argument(
        "--what-if",
        metavar="CHANGES",
        action="append",
        default=[],
        help="forecast on another cluster, e.g. gpus=2048",
    )
    analysis.add_argument(
        "--scale", metavar="A..B", help="best plan by number of GPUs, or of nodes without, e.g. 64..4096"
    )
    output = parser.add_argument_group("output")
    add_json_option(output)
    output.add_argument("--html", metavar="FILE", type=Path, help="write the result as one HTML page")
    output.add_argument(
        "--trace", metavar="FILE", type=Path, help="write the timeline of one step for ui.perfetto.dev"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.learn is not None:
        return _correct_calibration(arguments)
    if arguments.job is None:
        raise JobError("wanma plan: JOB is missing", "give a job file, or a run with --learn RUN")
    from wanma.data.data_kinds import with_data_kinds
    from wanma.job.file.loading import load_job

    overrides = [*arguments.overrides, *override_texts({"cluster.engine": arguments.engine})]
    job = with_data_kinds(load_job(arguments.job, overrides))
    cluster = arguments.cluster
    if arguments.engine is not None:
        from wanma.api.plan_report.command import engine_cluster

        if cluster is not None or arguments.device is not None:
            raise JobError(
                "--engine, --cluster and --device all set the nodes to plan for", "give one of them"
            )
        cluster = engine_cluster(job)
    from wanma.api.plan_report.command import plan_job
    from wanma.planner.presentation.plan_analysis import Questions

    questions = Questions(
        arguments.why,
        arguments.what_if,
        arguments.scale,
        timeline=arguments.html is not None or arguments.trace is not None,
    )
    answers, shown = plan_job(
        job,
        device=arguments.device,
        cluster=cluster,
        show_layout=arguments.explain,
        rank=arguments.rank,
        queries=questions,
    )
    if arguments.json:
        import json

        from wanma.planner.presentation.json_output import analysis_json

        print(json.dumps(analysis_json(answers), indent=2, allow_nan=False))
    else:
        from wanma.cli.output import print_content

        print_content(shown)
    _write_output_files(arguments, answers)
    return 0


def _write_output_files(arguments: argparse.Namespace, report: PlanAnalysis) -> None:
    """Write the requested files; print their paths to standard error, beside output for programs."""
    if arguments.trace is None and arguments.html is None:
        return
    from wanma.api.plan_report.html_page import write_page, write_trace

    if arguments.trace is not None:
        write_trace(report, arguments.trace)
        print(f"Timeline of one step: {arguments.trace} (open it in ui.perfetto.dev)", file=sys.stderr)
    if arguments.html is not None:
        write_page(report, arguments.html, title=f"Plan of {arguments.job.stem}")
        print(f"Page: {arguments.html}", file=sys.stderr)


def _correct_calibration(arguments: argparse.Namespace) -> int:
    from wanma.api.calibration.corrections import correct_calibration, corrections_table
    from wanma.cli.arguments import open_run
    from wanma.cli.output import print_content

    if arguments.job is not None:
        raise JobError("--learn takes a run, not a job", f"run `wanma plan --learn {arguments.learn}`")
    print_content(corrections_table(correct_calibration(open_run(arguments.learn))))
    return 0
