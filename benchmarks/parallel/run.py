"""Step time of each mesh dimension beside torchtitan's recipe in plain torch, in alternating pairs.

    python benchmarks/parallel/run.py --axis tp-sequence --ranks 2 4  # five minutes
    python benchmarks/parallel/run.py --axis pp-1f1b --cuts same      # both with torchtitan's stages
    python benchmarks/parallel/run.py --axis bubble --ranks 2         # wanma's pipelines beside their theory
    python benchmarks/parallel/run.py                                 # what is missing: 14 minutes
    python benchmarks/parallel/run.py --report

Every combination of axis, ranks and precision is one piece, of some two minutes; a piece adds its pairs to
the results file and prints its ratio, so that a long comparison can be run bit by bit. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.commands import prepare_data, wanma_command
from benchmarks.common import (  # after the path is set
    Piece,
    Results,
    carry_out,
    common_parser,
    describe_environment,
    disturbance_rule,
    take_pairs,
    take_rounds,
    undisturbed,
    verdict,
)
from benchmarks.parallel.axes import AXES
from benchmarks.parallel.bubble_runs import SCHEDULES, Bubble, measure_bubble
from benchmarks.parallel.contenders import Setting, default_setting, measure, measure_in_turns, peer_command
from benchmarks.parallel.context import measure_link
from benchmarks.parallel.report import report

Result = TypeVar("Result")

CHOSEN = ("zero3", "tp-sequence", "pp-1f1b", "ep", "cp-ring", "bubble")
"""Axes that are measured by default: one of each mesh dimension. Replicas are compared by suite ddp-peers."""
BUBBLE_ROUNDS, CONTEXT_ROUNDS = 1, 3
"""Maximum rounds of what is compared with theory; a bubble is the median of many steps."""


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks pairs."""
    results = Results(options.results)

    def save() -> None:
        results.save(report(results.pieces))

    def at_most(rounds: int) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(options), "pairs": min(options.pairs, rounds)})

    environment = describe_environment(options.venv)
    chosen: list[Setting | Bubble] = [*settings(options), *bubbles(options)]
    for setting in chosen:
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        piece["job"] = setting.job()
        prepare_data(setting.job())
        print(f"{_name(setting)}: {len(piece['pairs'])} pairs so far", flush=True)
        if isinstance(setting, Bubble):
            piece["commands"] = {"wanma": str(setting.command)}
            pipeline = {"wanma": _in_a_folder(partial(_bubble, setting, options.venv))}
            complete = take_pairs(piece, pipeline, at_most(BUBBLE_ROUNDS), save)
        else:
            allowed = at_most(CONTEXT_ROUNDS) if setting.what.context else options
            complete = compare(setting, piece, allowed, save)
        if not complete:
            return


def compare(setting: Setting, piece: Piece, options: argparse.Namespace, save: Callable[[], None]) -> bool:
    """Measure wanma beside its peer; return True if the piece is complete."""
    piece["commands"] = {"wanma": str(wanma_command()), "peer": str(peer_command(setting))}
    if setting.what.context and (options.fresh or "link" not in piece):
        piece["link"] = _in_a_folder(partial(measure_link, setting, options.venv))()
    if setting.turn_seconds:
        in_turns = _in_a_folder(partial(measure_in_turns, setting, options.venv, disturbance_rule(options)))
        complete = take_rounds(piece, lambda _: in_turns(), options, save)
    else:
        contenders = {
            who: _in_a_folder(partial(_sample, setting, who, options.venv)) for who in ("wanma", "peer")
        }
        complete = take_pairs(piece, contenders, options, save)
    if undisturbed(piece):
        print(f"  wanma: {verdict(piece)}", flush=True)
    return complete


def _in_a_folder(measured: Callable[[Path], Result]) -> Callable[[], Result]:
    """Return a function that calls `measured` in an empty folder of its own."""

    def call() -> Result:
        with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
            return measured(Path(folder))

    return call


def _sample(setting: Setting, who: str, venv: Path, folder: Path) -> dict[str, Any]:
    sample = measure(setting, who == "wanma", venv, folder)
    print(
        f"  {who}: {sample['tokens_per_second']:,.0f} tokens/s, loss {sample['losses'][-1]:.4f}, "
        f"{sample['command_seconds']:.0f} s in all",
        flush=True,
    )
    return sample


def _bubble(pipeline: Bubble, venv: Path, folder: Path) -> dict[str, Any]:
    sample = measure_bubble(pipeline, venv, folder)
    clock = "-" if sample["measured"] is None else f"{sample['measured']:.3f}"
    print(
        f"  waiting: theory {sample['theory']:.3f}, replayed {sample['replayed']:.3f}, measured {clock}; "
        f"{sample['command_seconds']:.0f} s in all",
        flush=True,
    )
    return sample


def _name(setting: Setting | Bubble) -> str:
    if isinstance(setting, Bubble):
        return f"bubble of {setting.bubble}, {setting.ranks} ranks"
    return f"{setting.what.title}, {setting.ranks} ranks, {setting.precision}"


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the chosen comparisons; bf16 only if the recipe has it."""
    given = _given(options, Setting)
    if "preset" in given:
        given.setdefault("heads", 0)
    for ranks, precision, axis in itertools.product(options.ranks, options.precision, options.axis):
        if axis == "bubble":
            continue
        if precision == "bf16" and not AXES[axis].half_precision:
            print(f"{AXES[axis].title}: torchtitan's recipe has no bf16 without FSDP; left out", flush=True)
            continue
        if not AXES[axis].pipelined:
            yield replace(
                default_setting(axis, ranks, precision), **{**given, "cuts": "own", "micro_batches": 1}
            )
        else:
            yield replace(default_setting(axis, ranks, precision), **given)


def bubbles(options: argparse.Namespace) -> Iterator[Bubble]:
    """Yield the chosen pipelines."""
    if "bubble" in options.axis:
        given = _given(options, Bubble)
        for ranks, schedule in itertools.product(options.ranks, options.schedule):
            yield Bubble(schedule, ranks, **given)


def _given(options: argparse.Namespace, kind: type[Setting] | type[Bubble]) -> dict[str, Any]:
    """Return the fields of `kind` that an option of the same name replaces."""
    values = {field.name: getattr(options, field.name, None) for field in fields(kind)}
    return {name: value for name, value in values.items() if isinstance(value, (int, float, str))}


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "parallel")
    parser.set_defaults(pairs=5)
    add = parser.add_argument
    add("--axis", nargs="+", choices=[*AXES, "bubble"], default=CHOSEN, help=f"default: {' '.join(CHOSEN)}")
    add("--ranks", nargs="+", type=int, default=[2], help="default: 2")
    add("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"], help="default: fp32")
    add("--cuts", choices=["own", "same"], default="own", help="stages of wanma: by cost, or as the recipe's")
    add("--schedule", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), help="of --axis bubble")
    add("--preset", help="wanma's name of the model (default: gpt-17m, for ep gpt-moe-43m)")
    add("--heads", type=int, help="attention heads; 0: the preset's own")
    add("--vocabulary", type=int)
    add("--sequence", type=int, help="tokens per sample (default 256, for cp 2048)")
    add("--batch", type=int, help="samples per step, of all ranks (default 8, for cp 1)")
    add("--micro-batches", type=int, help="of a pipeline (default 8)")
    add("--steps", type=int, help="measured steps (default 5, in bf16 9)")
    add(
        "--turn-seconds",
        type=float,
        help="have both contenders live beside each other and stop them in turn, after so long: on a machine "
        "that others slow down. --steps are then those of a whole run",
    )
    add("--warmup", type=int, help="steps before the measured ones (default 2)")
    options = parser.parse_args()
    if options.warmup is not None and options.warmup < 1:
        parser.error("--warmup is at least 1: the window starts at the end of a step")
    return options


if __name__ == "__main__":
    main()
