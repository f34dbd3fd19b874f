"""Action `wanma data convert`: stored data written in another format."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.data.arguments import (
    add_data_arguments,
    add_field_options,
    add_json_option,
    add_process_option,
    parse_size,
    select_data,
    shown_progress,
)
from wanma.job.errors import JobError

_EXAMPLES = """\
examples:
  wanma data convert data/*.jsonl --to parquet out
  wanma data convert pictures --to webdataset shards --shard-size 1GB
  wanma data convert corpus.parquet --to jsonl --compression zstd out --fields text,url
  wanma data convert job.toml --to megatron tokens --tokenizer tokenizer.json
  wanma data convert pictures --to mds --compression zstd shards

OUT is a new folder. Each shard is read back and compared before it counts. After an interruption the same
command goes on.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "convert", help="write data in another format, in shards; the source is not changed", epilog=_EXAMPLES
    )
    add_data_arguments(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the output; it must not exist")
    parser.add_argument(
        "--to",
        required=True,
        choices=["jsonl", "parquet", "webdataset", "megatron", "mds"],
        help="format of the output; megatron: tokens, as .bin and .idx; mds: shards of mosaicml-streaming",
    )
    parser.add_argument(
        "--compression", choices=["gzip", "zstd"], default="", help="compression of JSON lines; of MDS: zstd"
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=parse_size,
        default=256 << 20,
        help="bytes of the source for each shard, about, such as 1GB; default: 256MiB",
    )
    add_field_options(parser, "written")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer of --to megatron, 'bytes' or a tokenizer.json; without it rows hold tokens",
    )
    parser.add_argument(
        "--field", metavar="NAME", default="", help="field of the text or tokens, for --to megatron"
    )
    parser.add_argument(
        "--no-end-of-document",
        action="store_true",
        help="with --tokenizer: no token after each document that ends it",
    )
    parser.add_argument(
        "--skip-damaged", action="store_true", help="leave out damaged files and rows, and list them"
    )
    add_process_option(parser)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    from wanma.data.tools.conversion import convert_data
    from wanma.data.tools.shard_conversion import ConversionOptions

    selection = select_data(arguments)
    options = ConversionOptions(
        arguments.to,
        arguments.compression,
        tuple(arguments.fields),
        tuple(arguments.exclude),
        arguments.tokenizer or "",
        arguments.field,
        end_of_document=not arguments.no_end_of_document,
        skip_damaged=arguments.skip_damaged,
    )
    with shown_progress("converting") as progress:
        done = convert_data(
            selection,
            options,
            arguments.out,
            shard_bytes=arguments.shard_size,
            processes=arguments.processes,
            progress=progress,
        )
    if arguments.json:
        import json
        from dataclasses import asdict

        print(json.dumps(asdict(done), indent=2))
        return 0
    from wanma.api.data.statistics_text import conversion_text
    from wanma.cli.output import print_content

    print_content(conversion_text(done))
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that the format does not use.

    Raises:
        JobError: there is one.
    """
    if arguments.compression and arguments.to not in ("jsonl", "mds"):
        raise JobError(
            f"--compression is for --to jsonl and mds; {arguments.to} has its own", "remove --compression"
        )
    if arguments.compression == "gzip" and arguments.to == "mds":
        raise JobError("--to mds is compressed by zstd, not by gzip", "write --compression zstd")
    if arguments.to != "megatron" and (arguments.tokenizer or arguments.field):
        option = "--tokenizer" if arguments.tokenizer else "--field"
        raise JobError(f"{option} is for --to megatron", f"remove {option}")
    if arguments.to == "megatron" and (arguments.fields or arguments.exclude):
        raise JobError("--to megatron writes tokens alone", "name the text, or the tokens, with --field")
