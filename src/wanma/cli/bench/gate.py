"""Action `wanma bench gate`: two commits beside each other, for continuous integration."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import parse_count
from wanma.cli.bench.arguments import (
    add_measuring_options,
    add_turns_option,
    changed_rule,
    disturbance_limits,
    print_blocks,
)
from wanma.cli.output import print_progress

_EXAMPLES = """\
examples:
  wanma bench gate main HEAD                                  # the shipped suite gpt with the code of each
  wanma bench gate main HEAD --job job.toml --rounds 10
  wanma bench gate v1.2 HEAD --command 'python train.py --steps 100'

Exit code 1: the second commit is slower, fails, or cannot be judged. Both take turns in one session, so any
machine will do.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "gate",
        help="measure two commits in turn; exit code 1 if the second is slower or fails",
        epilog=_EXAMPLES,
    )
    parser.add_argument("before", metavar="COMMIT_A", help="the earlier commit")
    parser.add_argument("after", metavar="COMMIT_B", help="the later commit")
    parser.add_argument(
        "--command", metavar="TEXT", dest="text", help="a command in the commit's files, instead of a job"
    )
    parser.add_argument("--job", metavar="JOB|SUITE", default="gpt", help="job or suite; default: suite gpt")
    parser.add_argument(
        "--steps", metavar="N", type=parse_count, help="optimizer steps of an execution of a job"
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        action="append",
        default=[],
        help="metric to be judged; repeatable; default: step_seconds, or total_seconds without steps",
    )
    add_measuring_options(parser)
    add_turns_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.gate import run_gate
    from wanma.bench.presentation.result_blocks import result_blocks
    from wanma.bench.suites.suite_file import find_suite
    from wanma.bench.suites.suite_of_commands import suite_of_commands
    from wanma.bench.suites.suite_of_job import read_suite_or_job

    if arguments.text is not None:
        suite, rule = suite_of_commands(
            [arguments.text], patterns={}, target=arguments.until, turns=arguments.turns
        )
    else:
        suite, rule = read_suite_or_job(
            find_suite(arguments.job),
            target=arguments.until,
            steps=arguments.steps,
            turns=arguments.turns,
        )
    rule = changed_rule(rule, arguments)
    result, findings, directory = run_gate(
        suite,
        rule,
        (arguments.before, arguments.after),
        arguments.results,
        folder=Path(),
        metrics=arguments.metric,
        limits=disturbance_limits(rule, arguments),
        progress=print_progress,
        is_fresh=arguments.fresh,
    )
    print_blocks(result_blocks(result, [finding.metric for finding in findings[:1]]))
    for finding in findings:
        print(finding)
    print(f"result: {directory.path}")
    return int(any(finding.is_refused for finding in findings))
