"""Commands `wanma checkpoint list, verify, diff, convert`: the checkpoints of a run, a folder or a URL."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from wanma.cli.arguments import (
    add_json_option,
    add_runs_folder_option,
    complete_checkpoint_locations,
    resolve_checkpoint_location,
    set_completer,
)
from wanma.job.errors import EXIT_FAILED, JobError

_EXAMPLES = """\
examples:
  wanma checkpoint list                            # checkpoints of the newest run
  wanma checkpoint list s3://bucket/gpt            # uploaded checkpoints
  wanma checkpoint verify gpt                      # read every byte of every checkpoint
  wanma checkpoint diff runs/gpt/checkpoints/step-00000100 gpt
  wanma checkpoint convert gpt out --files 1       # one data file
  wanma checkpoint convert gpt out --format huggingface --precision bf16

PLACE is a run, a checkpoint folder, a folder of checkpoints, or (list, verify) a URL. Commands on a single
checkpoint use the newest complete one.
"""

Handler = Callable[[argparse.Namespace], int]


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "checkpoint", help="list, verify, compare and convert checkpoints", epilog=_EXAMPLES
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)

    list_parser = _add_action(actions, "list", "list checkpoints, newest first", _list)
    _add_location_argument(list_parser, "place", "?")
    add_json_option(list_parser)

    verify_parser = _add_action(
        actions, "verify", "read every byte and report all defects; exit code 1 if any", _verify
    )
    _add_location_argument(verify_parser, "place", "?")
    add_json_option(verify_parser)

    diff_parser = _add_action(actions, "diff", "compare two checkpoints; exit code 1 if they differ", _diff)
    _add_location_argument(diff_parser, "a")
    _add_location_argument(diff_parser, "b")
    diff_parser.add_argument(
        "--all", action="store_true", help="show all tensors; default: the 20 with the largest differences"
    )
    add_json_option(diff_parser)

    convert_parser = _add_action(
        actions, "convert", "write a checkpoint in another format; the source is not changed", _convert
    )
    _add_location_argument(convert_parser, "place")
    convert_parser.add_argument("to", metavar="OUT", type=Path, help="output folder")
    convert_parser.add_argument(
        "--format",
        choices=["checkpoint", "safetensors", "huggingface"],
        default="checkpoint",
        help="checkpoint: wanma's format (default); safetensors: weights under the model's names; "
        "huggingface: as written by wanma export",
    )
    convert_parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="precision of the weights; default: unchanged"
    )
    convert_parser.add_argument(
        "--files", metavar="N", type=int, help="data files of the checkpoint; default: 1"
    )
    convert_parser.add_argument("--weights", action="store_true", help="omit the optimizer state")


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: Handler
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    add_runs_folder_option(parser)
    parser.set_defaults(run=run)
    return parser


def _add_location_argument(parser: argparse.ArgumentParser, name: str, nargs: str | None = None) -> None:
    description = "a run, a checkpoint folder, a folder of checkpoints, or a URL"
    metavar = "PLACE" if name == "place" else name.upper()
    argument = parser.add_argument(
        name,
        metavar=metavar,
        nargs=nargs,
        help=f"{description}; default: the newest run" if nargs else description,
    )
    set_completer(argument, complete_checkpoint_locations)


def _list(arguments: argparse.Namespace) -> int:
    location = resolve_checkpoint_location(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import inventory
    from wanma.api.checkpoints.output_text import inventory_json, inventory_table
    from wanma.cli.output import print_content

    entries = inventory(location)
    if arguments.json:
        print(json.dumps(inventory_json(entries), indent=2))
    elif not entries:
        print(f"no checkpoints in {location} yet")
    else:
        print(location)
        print_content(inventory_table(entries))
        print("Only file sizes were checked; `wanma checkpoint verify` reads every byte.")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    location = resolve_checkpoint_location(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import scan_checkpoints
    from wanma.api.checkpoints.output_text import scan_json, scan_text
    from wanma.cli.output import print_content

    scans = []
    for scan in scan_checkpoints(location):
        scans.append(scan)
        if not arguments.json:
            print_content(scan_text(scan))
    if arguments.json:
        print(json.dumps([scan_json(scan) for scan in scans], indent=2))
    return 0 if all(scan.is_valid for scan in scans) else EXIT_FAILED


def _diff(arguments: argparse.Namespace) -> int:
    locations = [
        resolve_checkpoint_location(location, arguments.runs) for location in (arguments.a, arguments.b)
    ]
    from wanma.api.checkpoints.operations import compare_newest
    from wanma.api.checkpoints.output_text import MAX_SHOWN_TENSORS, comparison_json, comparison_tables
    from wanma.cli.output import print_content, print_warning

    a, b, comparison = compare_newest(locations[0], locations[1], print_warning)
    if arguments.json:
        print(json.dumps({"a": str(a), "b": str(b), **comparison_json(comparison)}, indent=2))
    else:
        print(f"A: {a}\nB: {b}")
        for part in comparison_tables(comparison, None if arguments.all else MAX_SHOWN_TENSORS):
            print_content(part)
    return 0 if comparison.is_empty else EXIT_FAILED


def _convert(arguments: argparse.Namespace) -> int:
    form = arguments.format
    if form != "checkpoint" and (arguments.files is not None or arguments.weights):
        option = "--files" if arguments.files is not None else "--weights"
        raise JobError(
            f"{option} needs --format checkpoint",
            f"remove {option}: {form} stores weights only, in its own files",
        )
    location = resolve_checkpoint_location(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import convert
    from wanma.cli.output import print_warning
    from wanma.observe.units import bytes_text, count_text

    done = convert(
        location,
        arguments.to,
        form,
        precision=arguments.precision,
        files=1 if arguments.files is None else arguments.files,
        weights_only=arguments.weights,
        on_message=print_warning,
    )
    print(
        f"{done.folder}: {count_text(done.tensors, 'tensor')}, {bytes_text(done.bytes)}, of {done.checkpoint}"
    )
    return 0
