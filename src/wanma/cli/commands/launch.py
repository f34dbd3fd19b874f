"""`wanma launch SCRIPT`: one's own training script on several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.job.errors import JobError

_EXAMPLES = """\
examples:
  wanma launch examples/own_loop.py --ranks 2
  wanma launch --ranks 2 my_script.py --learning-rate 3e-4    # --learning-rate goes to the script
  wanma launch --ranks 2 my_script.py -- --ranks 7            # after -- everything goes to the script

The script is plain Python and calls `wanma.session(...)`.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("launch", help="run your own script on several ranks", epilog=_EXAMPLES)
    parser.add_argument("--ranks", metavar="N", type=int, help="processes to start (required)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/SCRIPT")
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="Python file that uses wanma.session")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    ranks, rest = take_ranks(arguments.ranks, arguments.arguments)
    script: Path = arguments.script
    if not script.is_file():
        raise JobError(f"there is no script {script}", "`wanma train JOB.toml` trains a job file")
    from wanma.api.launch import launch_script

    return launch_script(script, rest, ranks, run_directory=arguments.run_dir)


def take_ranks(ranks: int | None, rest: list[str]) -> tuple[int, list[str]]:
    """`--ranks` may also follow the script; what stands after `--` is never ours."""
    ours, theirs = rest, []
    if "--" in rest:
        ours, theirs = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--ranks", type=int, default=ranks)
    try:
        found, ours = reader.parse_known_args(ours)
    except argparse.ArgumentError as error:
        raise JobError(f"wanma launch: {error}", "`--ranks 2` starts two processes") from None
    if found.ranks is None or found.ranks < 1:
        raise JobError("wanma launch: give --ranks N, at least 1", "`--ranks 2` starts two processes")
    return found.ranks, [*ours, *theirs]
