"""Command `wanma completion`: shell completion of commands, keys, values and run names."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_RC = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="print the line that turns on TAB completion",
        epilog="example:\n  wanma completion bash >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=tuple(_RC), nargs="?", help="shell; default: $SHELL")
    parser.add_argument("--code", action="store_true", help="print the completion code itself")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    login = Path(os.environ.get("SHELL", "")).name
    shell = arguments.shell or (login if login in _RC else "bash")
    if arguments.code:
        from argcomplete.shell_integration import shellcode

        print(shellcode(["wanma"], shell=shell))
        return 0
    if sys.stdout.isatty():
        print(f"add this line to {_RC[shell]} and open a new shell:", file=sys.stderr)
    load = f"wanma completion {shell} --code"
    print(f"{load} | source" if shell == "fish" else f'eval "$({load})"')
    return 0
