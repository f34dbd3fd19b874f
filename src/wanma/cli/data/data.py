"""Command `wanma data`: stored data of any format and store, and the data of jobs."""

from __future__ import annotations

import argparse

from wanma.cli.data import inspect, prepare, verify

_EXAMPLES = """\
examples:
  wanma data inspect data/*.jsonl.zst                # format, fields, lengths, first rows
  wanma data inspect job.toml data.sequence_length=1024
  wanma data verify s3://bucket/data                 # read everything, list what is damaged

DATA is files, folders, globs or URLs, or one job file with overrides (KEY=VALUE).
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="inspect, verify and prepare data", epilog=_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    for module in (inspect, verify, prepare):
        module.add_parsers(actions)
