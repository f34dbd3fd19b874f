"""Command `wanma doctor`: hardware and software of this node, missing parts, and advice."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_runs_folder

_STYLES = {"ok": ("green", "ok"), "warn": ("yellow", "look"), "missing": ("red", "missing")}


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="what this machine has, what it lacks, what to do")
    add_runs_folder(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from wanma.cli.output import show
    from wanma.hardware.checks.doctor import examine

    findings = examine(arguments.runs)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style, word = _STYLES[finding.status]
        told = Text(finding.text)
        if finding.advice:
            told.append(f"\n{finding.advice}", style="bold" if finding.status != "ok" else "dim")
        table.add_row(Text(word, style=style), Text(finding.name), told)
    show(table)
    return 0
