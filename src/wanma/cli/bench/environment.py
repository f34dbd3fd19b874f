"""Action `wanma bench environment`: Python environments of a suite's commands, shown, and made on request."""

from __future__ import annotations

import argparse

from wanma.cli.bench.arguments import add_environments_option
from wanma.cli.output import print_progress

_EXAMPLES = """\
examples:
  wanma bench environment ddp-peers              # which there are, and the command that makes the others
  wanma bench environment ddp-peers --make
  wanma bench environment sharded-peers --make --environments ~/environments

Without --make nothing is installed. A file is taken only if its hash is that of its pin. The index is that of
pip's own configuration, such as PIP_INDEX_URL.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "environment",
        help="show, or make, the pinned Python environments of a suite's commands",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "subject",
        metavar="SUITE|PINS",
        help="name of a shipped suite, suite file, or file of pins, such as environments/NAME.txt",
    )
    parser.add_argument("--make", action="store_true", help="make the environments that are missing")
    add_environments_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.environments.creation import MISSING, READY, environment_state, make_environment
    from wanma.bench.suites.suite_of_job import environments_of

    found = environments_of(arguments.subject, arguments.environments)
    if not found:
        print(f"the commands of {arguments.subject} need no Python environment of their own")
        return 0
    is_wrong = False
    for environment in found:
        state = environment_state(environment)
        if state == MISSING and arguments.make:
            make_environment(environment, print_progress)
            state = READY
        print(f"{environment.name}: {state}    {environment.folder}")
        if state == MISSING:
            print(f"  make it: {environment.creation}")
        is_wrong |= state != READY
    return int(is_wrong)
