"""Action `wanma bench scale`: scaling of a job, measured on what is here and forecast beyond it."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import parse_count, parse_share
from wanma.cli.bench.arguments import add_measuring_options, add_subject_arguments, measure

_EXAMPLES = """\
examples:
  wanma bench scale gpt                                              # measured on 1, 2 ... ranks of this node
  wanma bench scale job.toml --measure 1,2 --network 1x25G --to 4096 # nodes like this one
  wanma bench scale job.toml --measure none --gpu "H100 SXM" --gpu "A100 SXM 80 GB" --to 100_000
  wanma bench scale job.toml --weak --cluster site.toml

Forecasts stand beside the measurements, with the band in which 90 % of measurements are expected. The knee,
where efficiency falls below --efficiency, is explained by the part of a step that grows. `wanma plan --scale`
finds other layouts for as many devices.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "scale", help="measure and forecast the scaling of a job, and explain its limit", epilog=_EXAMPLES
    )
    add_subject_arguments(
        parser,
        "job file, suite file with one job, or name of a shipped suite",
        "overrides on every number of ranks",
    )
    add = parser.add_argument
    add(
        "--measure",
        metavar="N,N",
        help="numbers of ranks to be measured here, or 1..4, or none; default: 1, 2 ... to the GPUs or cores",
    )
    add("--to", metavar="N", type=parse_count, help="largest number of devices of a forecast; default: 1,024")
    add("--weak", action="store_true", help="the global batch grows with the ranks: weak scaling")
    add(
        "--batch-ranks",
        metavar="N",
        type=parse_count,
        help="weak scaling: ranks for which the job's global batch is meant; default: the fewest measured",
    )
    add(
        "--axis",
        choices=["dp_replicate", "dp_shard", "cp", "tp", "pp"],
        help="mesh dimension that grows; default: dp_shard if the job shards its state, else dp_replicate",
    )
    add(
        "--cluster",
        metavar="FILE",
        dest="clusters",
        action="append",
        default=[],
        help="cluster file, or such as '8x8 H100 SXM, 8x400G', whose nodes are forecast too; repeatable",
    )
    add(
        "--gpu",
        metavar="KIND",
        dest="gpus",
        action="append",
        default=[],
        help="device of the catalogue that is forecast too, in its usual servers; repeatable",
    )
    add("--network", metavar="NICS", help="network cards of a node such as this one, e.g. 8x400G")
    add(
        "--efficiency",
        metavar="E",
        type=parse_share,
        help="efficiency below which scaling has its knee; default: 0.8",
    )
    add_measuring_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.scale.suite import scale_suite
    from wanma.bench.suites.scale_table import parse_counts
    from wanma.bench.suites.suite_file import find_suite

    names = ("to", "weak", "axis", "clusters", "gpus", "network", "batch_ranks", "efficiency")
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.measure is not None:
        options["measure"] = parse_counts(arguments.measure)
    suite, rule = scale_suite(
        find_suite(arguments.subject), options, overrides=arguments.overrides, steps=arguments.steps
    )
    return measure(suite, rule, arguments)
