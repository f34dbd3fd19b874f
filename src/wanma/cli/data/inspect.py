"""Action `wanma data inspect`: format, fields, lengths and rows of stored data."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_json_option, parse_count
from wanma.cli.data.arguments import add_data_arguments, select_data, shown_progress
from wanma.job.errors import EXIT_FAILED

_EXAMPLES = """\
examples:
  wanma data inspect corpus.jsonl --rows 5
  wanma data inspect job.toml                       # tokens and sequences by the job's tokenizer
  wanma data inspect shards/*.tar --sample 20 --images pictures
  wanma data inspect tokens.bin tokens.idx --tokenizer tokenizer.json
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "inspect",
        help="show format, fields, lengths and some rows, decoded; exit code 1 if no row can be read",
        epilog=_EXAMPLES,
    )
    add_data_arguments(parser)
    parser.add_argument(
        "--rows", metavar="N", type=_parse_rows, default=3, help="rows shown from the beginning; default: 3"
    )
    parser.add_argument(
        "--sample", metavar="N", type=_parse_rows, default=0, help="rows shown besides, drawn at random"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of random rows; default: 0")
    parser.add_argument(
        "--characters",
        metavar="N",
        type=parse_count,
        default=300,
        help="characters of a text that are shown; default: 300",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="decode and count tokens; default: data.tokenizer of the job"
    )
    parser.add_argument(
        "--sequence-length",
        metavar="N",
        type=parse_count,
        help="tokens of a sequence; default: data.sequence_length of the job",
    )
    parser.add_argument(
        "--field", metavar="NAME", default="", help="field of the text whose tokens are counted"
    )
    parser.add_argument(
        "--images", metavar="DIR", type=Path, help="write the images of shown rows to this folder, as PNG"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.data.tools.inspection import InspectionOptions, inspect_data

    selection = select_data(arguments)
    options = InspectionOptions(
        arguments.rows,
        arguments.sample,
        arguments.seed,
        arguments.field,
        arguments.characters,
        arguments.images,
    )
    with shown_progress("indexing") as progress:
        sources = inspect_data(selection, options, progress)
    code = 0 if any(source.measured_rows for source in sources) else EXIT_FAILED
    if arguments.json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(source) for source in sources], indent=2))
        return code
    from wanma.api.data.inspection_text import inspection_texts
    from wanma.cli.output import print_content

    for number, source in enumerate(sources):
        if number:
            print()
        for part in inspection_texts(source):
            print_content(part)
    return code


def _parse_rows(text: str) -> int:
    return 0 if text == "0" else parse_count(text)
