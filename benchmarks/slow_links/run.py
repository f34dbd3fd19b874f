"""Training over a slow link between two nodes: wanma's ways to sum gradients, and DDP, in rounds.

    python benchmarks/slow_links/run.py                          # what is missing at 100 Mbit/s: 13 minutes
    python benchmarks/slow_links/run.py --megabits 1000          # another link: 7 minutes
    python benchmarks/slow_links/run.py --contender both int8 --pairs 1
    python benchmarks/slow_links/run.py --report

Needs root: the machines are network namespaces. Every link is one piece; in each of its rounds every
contender has its turn. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.commands import prepare_data
from benchmarks.common import (  # after the path is set
    BenchmarkError,
    Results,
    carry_out,
    common_parser,
    describe_environment,
    take_pairs,
    undisturbed,
)
from benchmarks.slow_links.contenders import (
    CONTENDERS,
    Contender,
    Setting,
    ddp_command,
    measure,
    wanma_command,
)
from benchmarks.slow_links.report import DDP, beside_ddp, report
from wanma.bench.programs.limited_link import missing_for_link

CHOSEN = ("both", "bf16", "int8", "topk", "powersgd", "diloco", "streaming")
"""Contenders that are measured by default; the others are parts of the first, or as fast as DiLoCo."""


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks pairs."""
    if missing := missing_for_link(max(options.delay)):
        raise BenchmarkError(f"needs {', '.join(missing)}")
    results = Results(options.results)
    environment = describe_environment(options.venv)
    for setting in settings(options):
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        piece["commands"] = {"wanma": str(wanma_command(setting)), "peer": str(ddp_command(setting))}
        piece["job"] = setting.job(None)
        prepare_data(setting.job(None))
        print(f"{setting.link}: {len(piece['pairs'])} rounds so far", flush=True)
        complete = take_pairs(
            piece,
            {
                name: partial(_sample, setting, name, CONTENDERS.get(name), options.venv)
                for name in (DDP, *setting.names)
            },
            options,
            save=lambda: results.save(report(results.pieces)),
        )
        for name in setting.names if undisturbed(piece) else ():
            print(f"  {name}: {beside_ddp(piece, name)}", flush=True)
        if not complete:
            return


def _sample(setting: Setting, name: str, way: Contender | None, venv: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        sample = measure(setting, way, venv, Path(folder))
    waited = f", waited {sample['waited']:.2f} s a step" if sample.get("waited") is not None else ""
    print(
        f"  {name}: {sample['tokens_per_second']:,.0f} tokens/s{waited}, "
        f"loss {sample['losses'][-1]:.4f}, {sample['command_seconds']:.0f} s in all",
        flush=True,
    )
    return sample


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the chosen comparisons."""
    for megabits, delay in itertools.product(options.megabits, options.delay):
        yield Setting(
            contenders="+".join(options.contender),
            megabits=megabits,
            delay=delay / 1000,
            precision=options.precision,
            preset=options.preset,
            vocabulary=options.vocabulary,
            sequence=options.sequence,
            batch=options.batch,
            warmup=options.warmup,
            steps=options.steps,
        )


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "slow-links")
    parser.set_defaults(pairs=3)
    add = parser.add_argument
    add("--megabits", nargs="+", type=float, default=[100.0], help="a second, each way (default 100)")
    add("--delay", nargs="+", type=float, default=[0.0], metavar="MS", help="each way (default 0)")
    add("--contender", nargs="+", choices=CONTENDERS, default=CHOSEN, help=f"default: {' '.join(CHOSEN)}")
    add("--precision", choices=["fp32", "bf16"], default="fp32")
    add("--preset", default="gpt-10m", help="wanma's name of the model (default gpt-10m)")
    add("--vocabulary", type=int, default=4096)
    add("--sequence", type=int, default=256)
    add("--batch", type=int, default=1, help="sequences per rank (default 1)")
    add("--steps", type=int, default=3, help="measured steps of DDP (default 3)")
    add("--warmup", type=int, default=1, help="steps before the measured ones (default 1)")
    options = parser.parse_args()
    if options.warmup < 1:
        parser.error("--warmup is at least 1: the window starts at the end of a step")
    return options


if __name__ == "__main__":
    main()
