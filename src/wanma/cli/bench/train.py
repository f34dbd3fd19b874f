"""Action `wanma bench train`: trainings of a job or a suite, each setting in turn."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import override_texts
from wanma.cli.bench.arguments import (
    add_environments_option,
    add_measuring_options,
    add_subject_arguments,
    add_turns_option,
    measure,
)
from wanma.job.errors import EXIT_USAGE, WanmaError

_EXAMPLES = """\
examples:
  wanma bench train gpt                                          # a shipped suite
  wanma bench train job.toml                                     # step time, throughput, MFU of a job
  wanma bench train job.toml --over parallel.dp_replicate=1,2,4  # strong scaling
  wanma bench train job.toml --over parallel.dp_replicate=1,2,4 --weak   # weak scaling
  wanma bench train job.toml --over train.precision=fp32,bf16 --budget 30m
  wanma bench train job.toml --until 'loss<=2.5' --rounds 3      # time to a target
  wanma bench train ddp-peers --environments DIR                 # other frameworks beside wanma
  wanma bench train job.toml --engine slurm --nodes 1,2,4

Settings take turns, so that a change of the machine affects all alike. What other programs disturb is
measured again. A benchmark that is stopped goes on when the command is repeated.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "train", help="measure trainings: a job with several settings, or a suite", epilog=_EXAMPLES
    )
    add_subject_arguments(
        parser, "job file, suite file, or name of a shipped suite", "overrides for all, e.g. train.steps=50"
    )
    parser.add_argument(
        "--over",
        metavar="KEY=V,V",
        action="append",
        default=[],
        help="values of a key to be measured, or 1..8 for 1,2,4,8; repeatable: all combinations",
    )
    parser.add_argument(
        "--weak",
        action="store_true",
        help="the global batch grows with the ranks, from the job's on the fewest: weak scaling",
    )
    parser.add_argument(
        "--contender",
        metavar="NAME",
        dest="contenders",
        action="append",
        default=[],
        help="contender that a suite lists; repeatable; default: all",
    )
    parser.add_argument("--baseline", metavar="NAME", help="contender that the others are compared with")
    parser.add_argument(
        "--engine", metavar="NAME", help="place of the runs (cluster.engine); `wanma engines` lists them"
    )
    parser.add_argument(
        "--nodes",
        metavar="N,N",
        help="numbers of nodes to be measured (cluster.nodes); one: that of all runs",
    )
    add_environments_option(parser)
    add_measuring_options(parser)
    add_turns_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.suites.suite_file import find_suite
    from wanma.bench.suites.suite_of_job import read_suite_or_job

    nodes = [] if arguments.nodes is None else override_texts({"cluster.nodes": arguments.nodes})
    several = nodes if "," in (arguments.nodes or "") else []
    places = override_texts({"cluster.engine": arguments.engine}) + (nodes if not several else [])
    suite, rule = read_suite_or_job(
        find_suite(arguments.subject),
        overrides=[*arguments.overrides, *places],
        over=[*arguments.over, *several],
        baseline=arguments.baseline,
        target=arguments.until,
        steps=arguments.steps,
        weak=arguments.weak,
        turns=arguments.turns,
        environments=arguments.environments,
        contenders=arguments.contenders,
    )
    commands = [one.name for one in suite.contenders if one.kind == "command"]
    if (places or several) and commands:
        raise WanmaError(
            f"--engine and --nodes are for jobs, and these contenders are commands: {', '.join(commands)}",
            "leave the options out, or write a suite of jobs",
            EXIT_USAGE,
        )
    return measure(suite, rule, arguments)
