"""Command `wanma engines`: engines that can be used here, and the reasons why others cannot."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "engines",
        help="list the engines, which place runs on nodes, and whether they can be used here",
        epilog="examples:\n  wanma engines\n  wanma train gpt.toml --engine slurm --nodes 8",
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    from wanma.api.engines.control import list_engines

    for name, reason in list_engines():
        print(f"{name:<8} {'usable' if reason is None else f'not usable: {reason}'}")
    return 0
