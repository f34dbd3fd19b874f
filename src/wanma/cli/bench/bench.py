"""Command `wanma bench`: benchmarks of trainings, of any program and of machines, and their results."""

from __future__ import annotations

import argparse

from wanma.cli.bench import gate, machine, results, run, scale, smoke, train


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure trainings, programs and machines; compare results")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for module in (train, scale, run, machine, gate, smoke, results):
        module.add_parsers(actions)
