"""Action `wanma data stats`: rows, bytes, lengths and duplicates of stored data."""

from __future__ import annotations

import argparse

from wanma.cli.data.arguments import (
    add_data_arguments,
    add_field_options,
    add_json_option,
    add_process_option,
    select_data,
    shown_progress,
)

_EXAMPLES = """\
examples:
  wanma data stats job.toml                         # by source and by file
  wanma data stats corpus --fields text             # rows with the same text are duplicates
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "stats", help="count rows, bytes, lengths and exact duplicates, by source and file", epilog=_EXAMPLES
    )
    add_data_arguments(parser)
    add_field_options(parser, "compared")
    parser.add_argument("--all", action="store_true", help="show all files; default: the 20 largest")
    add_process_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.data.tools.statistics import data_statistics

    selection = select_data(arguments)
    with shown_progress("reading") as progress:
        found = data_statistics(
            selection,
            fields=arguments.fields,
            excluded=arguments.exclude,
            processes=arguments.processes,
            progress=progress,
        )
    if arguments.json:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(found), indent=2))
        return 0
    from wanma.api.data.statistics_text import statistics_texts
    from wanma.cli.output import print_content

    for part in statistics_texts(found, show_all=arguments.all):
        print_content(part)
    return 0
