"""Command `wanma status RUN`: state of a submitted run, as its engine knows it."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show the state of a submitted run, and where it is",
        epilog="example:\n  wanma status gpt",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import find_submitted
    from wanma.cli.engines.records import warn_about_records

    run = resolve_run(arguments, allow_scripts=True)
    engine, record = find_submitted(run)
    warn_about_records(run)
    (status,) = engine.statuses([record.handle])
    print(f"{run.name}: {status.state}{f', exit code {status.exit_code}' if status.exit_code else ''}")
    print(f"  {engine.name}  {', '.join(status.job_ids)}")
    if status.nodes:
        print(f"  nodes  {', '.join(status.nodes)}")
    if status.reason:
        print(f"  reason {status.reason}")
    if (advice := engine.checkpoint_advice(record.handle)) is not None:
        print(f"  checkpoints are on the hosts; to copy them here: {advice}")
    if status.state == "pending":
        print(f"  `wanma explain {run.name}` says what it waits for")
    return 0
