"""Command `wanma explain RUN`: the constraint that keeps a submitted run waiting, and ways out."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="say why a submitted run waits, and what would start at once",
        epilog="example:\n  wanma explain gpt",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import explain_run

    explanation = explain_run(resolve_run(arguments, allow_scripts=True))
    print(explanation.summary)
    for line in explanation.advice:
        print(f"  {line}")
    return 0
