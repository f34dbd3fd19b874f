"""Command `wanma cancel RUN`: end a submitted run, with a checkpoint or at once."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cancel",
        help="stop a submitted run after its step, with a checkpoint",
        epilog="examples:\n  wanma cancel gpt\n  wanma cancel gpt --now\n\n"
        "The same command that started it resumes a cancelled run.",
    )
    add_run_arguments(parser)
    parser.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import cancel_run, find_submitted

    run = resolve_run(arguments, allow_scripts=True)
    is_script = find_submitted(run)[1].is_script
    before = cancel_run(run, is_immediate=arguments.now)
    if before.is_over:
        print(f"{run.name} has ended already: {before.state}")
    elif before.state == "pending" or arguments.now:
        print(f"{run.name}: cancelled")
    else:
        stop = "asked to stop" if is_script else "stops after its step, with a checkpoint"
        print(f"{run.name}: {stop}; `wanma status {run.name}` shows when")
    return 0
