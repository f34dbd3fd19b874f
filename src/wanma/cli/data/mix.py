"""Action `wanma data mix`: samples of each source that a run has seen."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, resolve_run
from wanma.cli.data.arguments import add_json_option


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "mix",
        help="show the samples of each source that a run has seen",
        epilog="example:\n  wanma data mix gpt --epochs",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--epochs", action="store_true", help="open the data, and show how often each source was seen"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.api.data.run_mixture import mixture_json, run_mixture
    from wanma.cli.engines.records import warn_about_records

    warn_about_records(chosen)
    found = run_mixture(chosen, count_epochs=arguments.epochs)
    if arguments.json:
        import json

        print(json.dumps(mixture_json(found), indent=2))
        return 0
    from wanma.api.data.statistics_text import mixture_texts
    from wanma.cli.output import print_content

    for part in mixture_texts(found):
        print_content(part)
    return 0
