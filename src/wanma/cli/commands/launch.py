"""`wanma launch SCRIPT`: one's own training script on several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.job.errors import JobError

_DESCRIPTION = """\
Run your own training script, plain Python that calls wanma.session(...), in several processes.

Options of `wanma launch` stand before SCRIPT. Everything after SCRIPT is the script's own.
"""
_EXAMPLES = """\
examples:
  wanma launch --ranks 2 examples/own_loop.py
  wanma launch --ranks 2 --run-dir runs/first my_script.py --learning-rate 3e-4    # the script's option
  wanma launch --ranks 8 --nodes 2 --rendezvous 10.0.0.1:29500 my_script.py        # on each machine
  wanma launch --ranks 2 --set cluster.hang_seconds=900 my_script.py

The same command carries on after a stop. Ctrl-C finishes the step and saves; a second one leaves at once.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="run your own script on several ranks",
        usage="wanma launch --ranks N [options] SCRIPT [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--ranks", metavar="N", type=int, help="processes to start on this machine (required)"
    )
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/SCRIPT")
    parser.add_argument("--nodes", metavar="N", help="machines, each with this command: cluster.nodes")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where they meet: cluster.rendezvous")
    parser.add_argument("--node-rank", metavar="R", help="this machine's number: cluster.node_rank")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any key of [cluster]; repeatable"
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="Python file that calls wanma.session")
    rest = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="the script's own"
    )
    rest.required = False  # argparse would list it among what is missing
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    script: Path = arguments.script
    if not script.is_file():
        raise JobError(f"there is no script {script}", "options stand before it: `wanma launch --help`")
    if arguments.ranks is None or arguments.ranks < 1:
        raise JobError(
            f"wanma launch: give --ranks N, at least 1, before {script}",
            f"`wanma launch --ranks 2 {script}` starts two processes",
        )
    from wanma.api.launch import launch_script

    return launch_script(
        script,
        arguments.arguments,
        arguments.ranks,
        run_directory=arguments.run_dir,
        overrides=[*arguments.set, *_options_as_overrides(arguments)],
    )


def _options_as_overrides(arguments: argparse.Namespace) -> list[str]:
    """Options that are another way to write a key, so that they are checked in one place."""
    written = {
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
    }
    return [f"{key}={value}" for key, value in written.items() if value is not None]
