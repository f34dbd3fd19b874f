"""Commands for submitted runs: `status`, `attach`, `cancel`, `explain`, `resize`, `shell`; and `engines`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from wanma.cli.arguments import add_run_arguments, parse_count, resolve_run
from wanma.observe.units import count_text


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    def add(
        name: str, run: Callable[[argparse.Namespace], int], description: str, epilog: str
    ) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=description, epilog=epilog)
        add_run_arguments(parser)
        parser.set_defaults(run=run)
        return parser

    add(
        "status",
        _status,
        "show the state of a submitted run, and where it is",
        "example:\n  wanma status gpt",
    )
    add(
        "attach",
        _attach,
        "show a submitted run as if it were in the foreground; Ctrl-C leaves it running",
        "example:\n  wanma attach gpt",
    )
    cancelling = add(
        "cancel",
        _cancel,
        "stop a submitted run after its step, with a checkpoint",
        "examples:\n  wanma cancel gpt\n  wanma cancel gpt --now\n\n"
        "The same command that started it resumes a cancelled run.",
    )
    cancelling.add_argument("--now", action="store_true", help="end it at once, without a checkpoint")
    add(
        "explain",
        _explain,
        "say why a submitted run waits, and what would start at once",
        "example:\n  wanma explain gpt",
    )
    resizing = add(
        "resize",
        _resize,
        "bring a run to another number of nodes, within the range of its job, or of parameter servers",
        "examples:\n  wanma resize gpt --nodes 4\n  wanma resize movielens --servers 3",
    )
    number = resizing.add_mutually_exclusive_group(required=True)
    number.add_argument("--nodes", metavar="N", type=int, help="number of nodes of a submitted run")
    number.add_argument("--servers", metavar="N", type=parse_count, help="number of parameter servers")
    shell = add(
        "shell",
        _shell,
        "open a shell on a node of a submitted run",
        "examples:\n  wanma shell gpt --node g7\n  wanma shell gpt --minutes 120",
    )
    shell.add_argument("--node", metavar="HOST", help="node; default: the first one")
    shell.add_argument(
        "--minutes",
        metavar="N",
        type=parse_count,
        help="time after which it ends with all that it has started; default: cluster.budget.shell_minutes",
    )
    engines = commands.add_parser(
        "engines",
        help="list the engines, which place runs on nodes, and whether they can be used here",
        epilog="examples:\n  wanma engines\n  wanma train gpt.toml --engine slurm --nodes 8",
    )
    engines.set_defaults(run=_engines)


def _status(arguments: argparse.Namespace) -> int:
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


def _attach(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.attachment import attach
    from wanma.api.engines.control import find_submitted

    run = resolve_run(arguments, allow_scripts=True)
    _, record = find_submitted(run)
    return attach(run, record)


def _cancel(arguments: argparse.Namespace) -> int:
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


def _explain(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import explain_run

    explanation = explain_run(resolve_run(arguments, allow_scripts=True))
    print(explanation.summary)
    for line in explanation.advice:
        print(f"  {line}")
    return 0


def _resize(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import resize_run, resize_servers

    run = resolve_run(arguments, allow_scripts=arguments.servers is None)
    if arguments.servers is not None:
        resize_servers(run, arguments.servers)
        servers = count_text(arguments.servers, "parameter server")
        print(f"{run.name}: {servers} requested; the run says when row ranges have moved")
        return 0
    resize_run(run, arguments.nodes)
    nodes = count_text(arguments.nodes, "node")
    print(f"{run.name}: {nodes} requested; `wanma attach {run.name}` shows the change")
    return 0


def _shell(arguments: argparse.Namespace) -> int:
    from wanma.api.engines.control import find_submitted

    engine, record = find_submitted(resolve_run(arguments, allow_scripts=True))
    minutes = arguments.minutes or record.read_submission("").settings.budget.shell_minutes
    command = engine.shell_command(record.handle, arguments.node, minutes)
    os.execvp(command[0], command)


def _engines(_: argparse.Namespace) -> int:
    from wanma.api.engines.control import list_engines

    for name, reason in list_engines():
        print(f"{name:<8} {'usable' if reason is None else f'not usable: {reason}'}")
    return 0
