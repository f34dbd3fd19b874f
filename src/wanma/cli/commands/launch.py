"""Command `wanma launch SCRIPT`: a user's own training script on several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import parse_integers
from wanma.job.errors import JobError

_TORCHRUN_OPTIONS = {
    "ranks": ("--nproc-per-node", "--nproc_per_node"),
    "nodes": ("--nnodes",),
    "node_rank": ("--node_rank",),
    "rendezvous": ("--rdzv-endpoint", "--rdzv_endpoint"),
    "max_restarts": ("--max-restarts", "--max_restarts"),
}
"""Options in torchrun's spelling, by their destination here."""
_DESCRIPTION = """\
Run your own training script in several processes: plain Python, as for torchrun, or with wanma.session(...).

Options of `wanma launch` come before SCRIPT. Arguments after SCRIPT are passed to the script.
"""
_EXAMPLES = """\
examples:
  wanma launch --ranks 2 examples/own_loop.py
  wanma launch --ranks 2 --run-dir runs/first my_script.py --learning-rate 3e-4    # option of the script
  wanma launch --ranks 2 -m my_package.train                                       # a module
  wanma launch --ranks 8 --nodes 2 --rendezvous 10.0.0.1:29500 my_script.py        # on each node
  wanma launch --ranks 2 --set cluster.max_restarts=3 my_script.py                 # torchrun --max-restarts 3

Each process reads its rank from the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
With wanma.session, the same command resumes after a stop. Ctrl-C completes the step and saves a checkpoint; a
second Ctrl-C exits at once. Other scripts receive SIGINT, as from a terminal.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="run your own training script on several ranks",
        usage="wanma launch --ranks N [options] SCRIPT [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("--ranks", metavar="N", type=int, help="processes to start on this node (required)")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/SCRIPT")
    parser.add_argument(
        "--nodes", metavar="N", help="number of nodes; run the same command on each (cluster.nodes)"
    )
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="rendezvous address of the nodes (cluster.rendezvous)"
    )
    parser.add_argument("--node-rank", metavar="R", help="rank of this node (cluster.node_rank)")
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override of a [cluster] key; repeatable",
    )
    parser.add_argument(
        "--show",
        metavar="RANKS",
        type=_parse_shown_ranks,
        help="ranks with output on the console: all (default), none, or e.g. 0,3",
    )
    for meaning, spelled in _TORCHRUN_OPTIONS.items():
        kind = int if meaning == "ranks" else str
        parser.add_argument(*spelled, dest=meaning, type=kind, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    for option in ("--local-rank", "--local_rank"):
        parser.add_argument(
            option,
            dest="local_rank_option",
            action="store_const",
            const=option,
            default="",
            help=f"pass {option}=N to each process, as torch.distributed.launch does",
        )
    parser.add_argument(
        "--use-env", "--use_env", action="store_true", help="pass the local rank by variables only (default)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python file")
    arguments = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    arguments.required = False  # argparse would list it among what is missing
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    script: str = arguments.script
    if not arguments.module and not Path(script).is_file():
        raise JobError(
            f"there is no script {script}",
            "put options of wanma launch before SCRIPT; see `wanma launch --help`",
        )
    if arguments.ranks is None or arguments.ranks < 1:
        raise JobError(
            f"wanma launch: --ranks N, at least 1, is missing before {script}",
            f"for two processes: `wanma launch --ranks 2 {script}`",
        )
    _check_shown_ranks(arguments.show, arguments.ranks, nodes=arguments.nodes or "1")
    from wanma.api.launch.script_launch import Program, launch_script

    option = "" if arguments.use_env else arguments.local_rank_option
    return launch_script(
        Program(script, tuple(arguments.arguments), arguments.module, option),
        arguments.ranks,
        run_directory=arguments.run_dir,
        overrides=[*arguments.set, *_cluster_overrides(arguments)],
        shown_ranks=arguments.show,
    )


def _parse_shown_ranks(text: str) -> list[int] | None:
    """Parse the ranks of `--show`; None: all."""
    named: dict[str, list[int] | None] = {"all": None, "none": []}
    return named[text] if text in named else parse_integers(text)


def _check_shown_ranks(shown_ranks: list[int] | None, ranks: int, nodes: str) -> None:
    """Refuse ranks of `--show` that will not exist; on several nodes the number of ranks may change.

    Raises:
        JobError: names the first such rank.
    """
    for rank in shown_ranks or ():
        if rank < 0 or (nodes == "1" and rank >= ranks):
            raise JobError(
                f"wanma launch: --show {rank}: no such rank",
                f"ranks are 0 to {ranks - 1}; or give all or none" if nodes == "1" else "ranks begin at 0",
            )


def _cluster_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return options that are another form of a key as overrides, so that one place checks them."""
    written = {
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
        "cluster.max_restarts": arguments.max_restarts,
    }
    return [f"{key}={value}" for key, value in written.items() if value is not None]
