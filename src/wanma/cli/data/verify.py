"""Action `wanma data verify`: damaged files and rows of stored data."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_json_option
from wanma.cli.data.arguments import (
    add_data_arguments,
    add_process_option,
    select_data,
    shown_progress,
)
from wanma.job.errors import EXIT_FAILED

_EXAMPLES = """\
examples:
  wanma data verify data/*.tar
  wanma data verify s3://bucket/data --json > damage.json
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "verify",
        help="read everything and list damaged files and rows; exit code 1 if any",
        epilog=_EXAMPLES,
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="check that tokens are in its vocabulary; default: as in the job"
    )
    parser.add_argument("--all", action="store_true", help="show all damage; default: the first 20")
    add_process_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.data.tools.verification import verification_json, verify_data

    selection = select_data(arguments)
    with shown_progress("reading") as progress:
        found = verify_data(selection, processes=arguments.processes, progress=progress)
    if arguments.json:
        import json

        print(json.dumps(verification_json(found), indent=2))
    else:
        from wanma.api.data.inspection_text import verification_texts
        from wanma.cli.output import print_content

        for part in verification_texts(found, show_all=arguments.all):
            print_content(part)
    return EXIT_FAILED if found.damages else 0
