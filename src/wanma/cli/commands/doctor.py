"""Command `wanma doctor`: hardware and software of this node, missing parts, and advice."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_runs_folder_option

_STYLES = {"ok": ("green", "ok"), "warn": ("yellow", "look"), "missing": ("red", "missing")}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="check this node: devices, network, packages", epilog="example:\n  wanma doctor"
    )
    add_runs_folder_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from rich.table import Table
    from rich.text import Text

    from wanma.cli.output import print_content
    from wanma.hardware.checks.doctor import run_checks

    findings = run_checks(arguments.runs)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style, label = _STYLES[finding.status]
        description = Text(finding.text)
        if finding.remedy:
            description.append(f"\n{finding.remedy}", style="bold" if finding.status != "ok" else "dim")
        table.add_row(Text(label, style=style), Text(finding.name), description)
    print_content(table)
    return 0
