"""Commands `wanma checkpoint list, verify, diff, convert`: the checkpoints of a run, a folder or a URL."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from wanma.cli.arguments import add_runs_folder, checkpoint_places, chosen_place, complete_with
from wanma.job.errors import EXIT_FAILED, JobError

_EXAMPLES = """\
examples:
  wanma checkpoint list                                   of the newest run
  wanma checkpoint list s3://bucket/gpt                   what was uploaded
  wanma checkpoint verify gpt                             every byte of every checkpoint
  wanma checkpoint diff runs/gpt/checkpoints/step-00000100 gpt
  wanma checkpoint convert gpt out --files 1              one data file
  wanma checkpoint convert gpt out --format huggingface --precision bf16

PLACE is a run, a checkpoint's folder, a folder of them, or (list, verify) a URL; where one checkpoint is
meant, the newest whole one is taken.
"""

Run = Callable[[argparse.Namespace], int]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "checkpoint", help="list, verify, compare and convert checkpoints", epilog=_EXAMPLES
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)

    found = _action(actions, "list", "what there is, newest first", _list)
    _place(found, "place", "?")
    _json(found)

    verified = _action(actions, "verify", "read every byte, and tell all that is wrong; exit code 1", _verify)
    _place(verified, "place", "?")
    _json(verified)

    compared = _action(actions, "diff", "what differs between two; exit code 1 if anything", _diff)
    _place(compared, "a")
    _place(compared, "b")
    compared.add_argument("--all", action="store_true", help="all tensors; default: the 20 that differ most")
    _json(compared)

    converted = _action(actions, "convert", "write one anew; the one read is never changed", _convert)
    _place(converted, "place")
    converted.add_argument("to", metavar="OUT", type=Path, help="folder to make")
    converted.add_argument(
        "--format",
        choices=["checkpoint", "safetensors", "huggingface"],
        default="checkpoint",
        help="checkpoint: wanma's own (default); safetensors: the weights by the model's own names; "
        "huggingface: as wanma export",
    )
    converted.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="of the weights; default: as they are"
    )
    converted.add_argument("--files", metavar="N", type=int, help="data files of a checkpoint; default: 1")
    converted.add_argument("--weights", action="store_true", help="leave the optimizer's state away")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, run: Run
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_runs_folder(parser)
    parser.set_defaults(run=run)
    return parser


def _place(parser: argparse.ArgumentParser, name: str, nargs: str | None = None) -> None:
    about = "a run, a checkpoint's folder, a folder of them, or a URL"
    metavar = "PLACE" if name == "place" else name.upper()
    place = parser.add_argument(
        name, metavar=metavar, nargs=nargs, help=f"{about}; default: the newest run" if nargs else about
    )
    complete_with(place, checkpoint_places)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _list(arguments: argparse.Namespace) -> int:
    place = chosen_place(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import inventory
    from wanma.api.checkpoints.output_text import inventory_json, inventory_table
    from wanma.cli.output import show

    entries = inventory(place)
    if arguments.json:
        print(json.dumps(inventory_json(entries), indent=2))
    elif not entries:
        print(f"no checkpoints in {place} yet")
    else:
        print(place)
        show(inventory_table(entries))
        print("As far as sizes tell; `wanma checkpoint verify` reads every byte.")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    place = chosen_place(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import scans
    from wanma.api.checkpoints.output_text import scan_json, scan_text
    from wanma.cli.output import show

    found = []
    for one in scans(place):
        found.append(one)
        if not arguments.json:
            show(scan_text(one))
    if arguments.json:
        print(json.dumps([scan_json(one) for one in found], indent=2))
    return 0 if all(one.is_whole for one in found) else EXIT_FAILED


def _diff(arguments: argparse.Namespace) -> int:
    places = [chosen_place(place, arguments.runs) for place in (arguments.a, arguments.b)]
    from wanma.api.checkpoints.operations import diff
    from wanma.api.checkpoints.output_text import SHOWN, comparison_json, comparison_tables
    from wanma.cli.output import show, warn

    a, b, found = diff(places[0], places[1], warn)
    if arguments.json:
        print(json.dumps({"a": str(a), "b": str(b), **comparison_json(found)}, indent=2))
    else:
        print(f"A: {a}\nB: {b}")
        for part in comparison_tables(found, None if arguments.all else SHOWN):
            show(part)
    return 0 if found.is_none else EXIT_FAILED


def _convert(arguments: argparse.Namespace) -> int:
    form = arguments.format
    if form != "checkpoint" and (arguments.files is not None or arguments.weights):
        option = "--files" if arguments.files is not None else "--weights"
        raise JobError(
            f"{option} belongs to --format checkpoint", f"{form} has weights only, in its own files"
        )
    place = chosen_place(arguments.place, arguments.runs)
    from wanma.api.checkpoints.operations import convert
    from wanma.cli.output import warn
    from wanma.observe.units import bytes_text, count_text

    done = convert(
        place,
        arguments.to,
        form,
        precision=arguments.precision,
        files=1 if arguments.files is None else arguments.files,
        weights_only=arguments.weights,
        on_message=warn,
    )
    print(
        f"{done.folder}: {count_text(done.tensors, 'tensor')}, {bytes_text(done.bytes)}, of {done.checkpoint}"
    )
    return 0
