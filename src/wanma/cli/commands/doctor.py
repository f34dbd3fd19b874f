"""Command `wanma doctor`: hardware and software of this node, missing parts, and advice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wanma.cli.arguments import add_runs_folder_option

if TYPE_CHECKING:
    from wanma.hardware.checks.doctor import CheckResult

_STYLES = {"ok": ("green", "ok"), "warn": ("yellow", "look"), "missing": ("red", "missing")}


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor", help="check this node: devices, network, packages", epilog="example:\n  wanma doctor"
    )
    add_runs_folder_option(parser)
    parser.add_argument(
        "--parity",
        action="store_true",
        help="train a small model in several layouts and compare the losses; done anyway with a torch that "
        "is newer than any tried",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.hardware.checks.doctor import run_checks
    from wanma.torch_internals.versions import untried_version_note

    findings = run_checks(arguments.runs)
    has_torch = not any(finding.name == "torch" and finding.status == "missing" for finding in findings)
    _print_findings(findings)
    if has_torch and (arguments.parity or untried_version_note() is not None):
        from wanma.api.parity_check import check_parity

        _print_findings(check_parity())
    return 0


def _print_findings(findings: Sequence[CheckResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    from wanma.cli.output import print_content

    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style, label = _STYLES[finding.status]
        description = Text(finding.text)
        if finding.remedy:
            description.append(f"\n{finding.remedy}", style="bold" if finding.status != "ok" else "dim")
        table.add_row(Text(label, style=style), Text(finding.name), description)
    print_content(table)
