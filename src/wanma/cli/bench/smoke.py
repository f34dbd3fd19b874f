"""Action `wanma bench smoke`: every shipped suite in small."""

from __future__ import annotations

import argparse

from wanma.cli.bench.arguments import add_environments_option, add_results_option
from wanma.cli.output import print_progress


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "smoke",
        help="run each shipped suite in seconds, to see that it works here",
        epilog="examples:\n  wanma bench smoke gpt checkpoint\n  wanma bench smoke --list",
    )
    parser.add_argument(
        "suites", metavar="SUITE", nargs="*", default=[], help="names of suites; default: all"
    )
    parser.add_argument("--list", action="store_true", help="list the shipped suites")
    add_environments_option(parser)
    add_results_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.smoke import list_suites, run_smoke

    if arguments.list:
        for name, title in list_suites():
            print(f"{name:14} {title}")
        return 0
    has_failed = False
    for outcome in run_smoke(arguments.suites, arguments.results, print_progress, arguments.environments):
        print(outcome, flush=True)
        has_failed |= bool(outcome.problem)
    return int(has_failed)
