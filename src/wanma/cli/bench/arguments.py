"""Arguments shared by the benchmarks, and the end that they have in common."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import (
    complete_overrides,
    override_texts,
    parse_amount,
    parse_count,
    parse_share,
    set_completer,
)
from wanma.cli.output import print_content, print_progress, print_warning

if TYPE_CHECKING:
    from wanma.bench.meter.disturbance import DisturbanceLimits
    from wanma.bench.presentation.blocks import Block
    from wanma.bench.results.directory import ResultDirectory
    from wanma.bench.runner import Rule
    from wanma.bench.suites.suite_file import Suite

RESULTS_FOLDER = Path("bench-results")
"""Folder of all results, in the working directory."""


def add_results_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        default=RESULTS_FOLDER,
        help="folder of results; default: bench-results",
    )


def add_environments_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--environments",
        metavar="DIR",
        type=Path,
        help="folder of the Python environments of a suite's commands; default: $WANMA_BENCH_ENVIRONMENTS, "
        "or bench-environments",
    )


def add_subject_arguments(parser: argparse.ArgumentParser, subject: str, overrides: str) -> None:
    """Add JOB|SUITE, KEY=VALUE and the option of the steps.

    Args:
        parser: parser of the action.
        subject: help of JOB|SUITE.
        overrides: help of KEY=VALUE.
    """
    parser.add_argument("subject", metavar="JOB|SUITE", help=subject)
    argument = parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", default=[], help=overrides)
    set_completer(argument, complete_overrides)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=parse_count,
        help="optimizer steps of an execution; default: the job's, or 60",
    )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the amount of measuring."""
    parser.add_argument("--rounds", metavar="N", type=parse_count, help="maximum rounds; default: 10")
    parser.add_argument(
        "--precision",
        metavar="P",
        type=parse_share,
        help="interval half width that ends it; default: 0.02",
    )
    parser.add_argument(
        "--budget", metavar="TIME", help="time after which nothing starts, such as 30m; default: none"
    )
    parser.add_argument("--timeout", metavar="TIME", help="time of one execution at most; default: 1h")
    parser.add_argument(
        "--until", metavar="TARGET", help="loss<=2.5, accuracy>=0.9, or converged:0.01/2000 (samples)"
    )
    add_result_options(parser)


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a result's place and of the measurements that count."""
    parser.add_argument(
        "--foreign-limit",
        metavar="CPUS",
        type=parse_amount,
        help="CPUs of other programs that disturb a measurement; default: 0.1, in turns none",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin a new result, even if one of this suite is unfinished"
    )
    add_results_option(parser)


def add_turns_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turns",
        metavar="TIME",
        help="let the contenders live at once and run in turns of this time, such as 1s, on a machine that "
        "others use too; default: each runs alone",
    )


def cluster_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the keys of `[cluster]` that the options of several nodes and --set give."""
    named = {
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
    }
    return [*arguments.set, *override_texts(named)]


def changed_rule(rule: Rule, arguments: argparse.Namespace) -> Rule:
    """Return a suite's rule with what the command line says."""
    from wanma.bench.runner import duration_seconds

    changes = {
        "rounds": arguments.rounds,
        "precision": arguments.precision,
        "budget_seconds": None if arguments.budget is None else duration_seconds(arguments.budget),
        "timeout_seconds": None if arguments.timeout is None else duration_seconds(arguments.timeout),
    }
    return rule.model_copy(update={name: one for name, one in changes.items() if one is not None})


def measure(suite: Suite, rule: Rule, arguments: argparse.Namespace) -> int:
    """Run a benchmark by its rule and the options; return the exit code: 1 if a contender has no figure."""
    rule = changed_rule(rule, arguments)
    _, exit_code = measure_result(suite, rule, arguments, disturbance_limits(rule, arguments))
    return exit_code


def disturbance_limits(rule: Rule, arguments: argparse.Namespace) -> DisturbanceLimits:
    """Return the limits within which a measurement counts; in turns, foreign load is on all alike."""
    from wanma.bench.meter.disturbance import NO_LIMITS, DisturbanceLimits

    limits = DisturbanceLimits()
    if arguments.foreign_limit is not None:
        return dataclasses.replace(limits, foreign_cpu=arguments.foreign_limit)
    return dataclasses.replace(limits, foreign_cpu=NO_LIMITS.foreign_cpu) if rule.turn_seconds else limits


def measure_result(
    suite: Suite,
    rule: Rule,
    arguments: argparse.Namespace,
    limits: DisturbanceLimits,
) -> tuple[ResultDirectory, int]:
    """Run a benchmark, show it, and return its folder and the exit code.

    Args:
        suite: the suite.
        rule: amount of measuring.
        arguments: options of the command line.
        limits: limits within which a measurement counts.
    """
    from wanma.bench.benchmark import open_directory, run_benchmark
    from wanma.bench.display import blocks_of

    directory = open_directory(arguments.results, suite, print_progress, is_fresh=arguments.fresh)
    try:
        result = run_benchmark(suite, rule, directory, limits=limits, progress=print_progress)
    except KeyboardInterrupt:
        print_progress(f"\n{directory.path} has not ended: repeat the command, and it goes on")
        raise
    print_blocks(blocks_of(result, directory, suite.file.metrics))
    print(f"result: {directory.path}    page: {directory.page}")
    missing = [name for name in result.contender_names if not result.measurements_of(name)]
    if missing:
        print_warning(f"no measurement counts of: {', '.join(missing)}")
    return directory, int(bool(missing))


def print_blocks(blocks: Iterable[Block]) -> None:
    from wanma.bench.presentation.blocks import terminal

    print_content(terminal(blocks))
