"""Arguments of `wanma launch` in torchrun's spelling: a command line of torchrun works unchanged."""

from __future__ import annotations

import argparse
import os
import re

from wanma.job.errors import JobError

_SAME_MEANING = {
    "ranks": ("--nproc-per-node", "--nproc_per_node"),
    "nodes": ("--nnodes",),
    "node_rank": ("--node_rank",),
    "rendezvous": ("--rdzv-endpoint", "--rdzv_endpoint"),
    "max_restarts": ("--max-restarts", "--max_restarts"),
}
"""Options of torchrun by the destination of the option that means the same here."""
_NO_EFFECT = (
    *("--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--local-addr", "--monitor-interval", "--start-method"),
    *("--role", "--log-dir", "--redirects", "--tee", "--logs-specs"),
)
"""Options of torchrun, with a value, for its own rendezvous, watching of processes, and logs."""
_NO_EFFECT_FLAGS = ("--no-python", "--run-path")
"""Options of torchrun for the same, without a value."""
DEFAULT_MASTER_PORT = 29500
"""Port of `--master-addr` without `--master-port`, as torchrun has it."""
_SHORT = {"--redirects": "-r", "--tee": "-t"}


def parse_ranks(text: str) -> int | str:
    """Parse the number of ranks on a node: a number, or torchrun's auto, gpu or cpu; for argparse."""
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number, auto, gpu or cpu") from None


def add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `read_torchrun_arguments` reads; no help lists them."""
    for meaning, spelled in _SAME_MEANING.items():
        kind = parse_ranks if meaning == "ranks" else str
        parser.add_argument(*spelled, dest=meaning, type=kind, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)
    for name in ("--master-addr", "--master-port"):
        parser.add_argument(*_spellings(name), help=argparse.SUPPRESS)
    for name in _NO_EFFECT:
        parser.add_argument(*_spellings(name), dest="without_effect", help=argparse.SUPPRESS)
    for name in _NO_EFFECT_FLAGS:
        parser.add_argument(
            *_spellings(name), dest="without_effect", action="store_true", help=argparse.SUPPRESS
        )


def _spellings(name: str) -> tuple[str, ...]:
    """Return the option as torchrun spells it: with hyphens, with underscores, and its letter."""
    names = (name, "--" + name[2:].replace("-", "_"), _SHORT.get(name, name))
    return tuple(dict.fromkeys(names))


def read_torchrun_arguments(arguments: argparse.Namespace) -> None:
    """Replace torchrun's words by what they mean here: a number of ranks, and one address of the nodes.

    Raises:
        JobError: they contradict each other, or cannot be known here.
    """
    if arguments.nodes is not None:
        arguments.nodes = re.sub(
            r"^(\d+):(\d+)$", lambda ends: "..".join(dict.fromkeys(ends.groups())), arguments.nodes
        )
    is_one_node = arguments.nodes in (None, "1")
    if arguments.standalone and not is_one_node:
        raise JobError(
            f"wanma launch: --standalone is for one node, and --nodes is {arguments.nodes}",
            "leave --standalone out, and give --rendezvous HOST:PORT of the first node",
        )
    if arguments.standalone or (arguments.rendezvous or "").endswith(":0"):
        arguments.rendezvous = None  # torchrun's localhost:0, by which one node meets itself
    if not is_one_node and arguments.master_addr is not None:
        place = f"{arguments.master_addr}:{arguments.master_port or DEFAULT_MASTER_PORT}"
        if arguments.rendezvous not in (None, place):
            raise JobError(
                f"wanma launch: --rendezvous is {arguments.rendezvous}, and that of --master-addr is {place}",
                "give one of them",
            )
        arguments.rendezvous = place
    if isinstance(arguments.ranks, str):
        arguments.ranks = _count_devices(arguments.ranks, arguments.engine)


def _count_devices(kind: str, engine: str | None) -> int:
    """Return the ranks of a node that torchrun's auto, gpu or cpu stands for."""
    if engine not in (None, "local"):
        raise JobError(
            f"wanma launch: --nproc-per-node {kind} cannot be counted before a node of {engine} is known",
            "give the number of ranks on each node, e.g. --ranks 8",
        )
    import torch

    gpus = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "gpu" and not gpus:
        raise JobError(
            "wanma launch: --nproc-per-node gpu, and torch finds no GPU on this node",
            "see `wanma doctor`; or give a number, e.g. --ranks 2",
        )
    return gpus or os.cpu_count() or 1
