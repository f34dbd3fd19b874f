"""Train the same model on the same data by wanma and by its peers, in alternating pairs.

    python benchmarks/train/run.py --setup                        # the peers, in an environment of their own
    python benchmarks/train/run.py --table a --precision bf16 --peer ddp --pairs 7
    python benchmarks/train/run.py                                # everything that is not measured yet
    python benchmarks/train/run.py --report

Every combination of the options is one piece; a piece adds its pairs to the results file and prints its
ratio, so that a long comparison can be run bit by bit. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (  # after the path is set
    Noise,
    Results,
    carry_out,
    common_parser,
    describe_environment,
    estimate,
    take_pairs,
)
from benchmarks.train.contenders import PEERS, Setting, measure, peer_command, wanma_command
from benchmarks.train.report import ratios, report
from wanma.data.opening import prepare_job_data
from wanma.job.file.loading import load_job


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks pairs."""
    results = Results(options.results)
    deadline = time.monotonic() + options.minutes * 60
    environment = describe_environment(options.venv)
    for setting in settings(options):
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        piece["commands"] = {"wanma": str(wanma_command()), "peer": str(peer_command(setting))}
        piece["job"] = setting.job(one_process=False)
        _prepare_data(setting)
        print(f"{_name(setting)}: {len(piece['pairs'])} pairs so far", flush=True)
        complete = take_pairs(
            piece,
            {
                "wanma": partial(_sample, setting, True, options.venv),
                "peer": partial(_sample, setting, False, options.venv),
            },
            pairs=options.pairs,
            noise=Noise(options.foreign_limit, options.retries),
            deadline=deadline,
            save=lambda: results.save(report(results.pieces)),
        )
        if values := ratios(piece):
            print(f"  ratio {estimate(values)} of {len(values)} pairs", flush=True)
        if not complete:
            print("the time is over; run the same command again to carry on")
            return


def _sample(setting: Setting, wanma: bool, venv: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as folder:
        sample = measure(setting, wanma, venv, Path(folder))
    who = "wanma" if wanma else PEERS[setting.peer].title
    print(
        f"  {who}: {sample['tokens_per_second']:,.0f} tokens/s, loss {sample['losses'][-1]:.4f}, "
        f"{sample['command_seconds']:.0f} s in all",
        flush=True,
    )
    return sample


def _prepare_data(setting: Setting) -> None:
    """Build the token files, once, for all contenders."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(setting.job(one_process=False))
        prepare_job_data(load_job(path).data)


def _name(setting: Setting) -> str:
    compiled = ", compiled" if setting.compile else ""
    return f"table {setting.table}, {setting.precision}{compiled}, {setting.batch} per rank, {setting.peer}"


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the chosen pieces, those of one table together."""
    chosen = itertools.product(options.table, options.compile, options.precision, options.batch, options.peer)
    for table, compiled, precision, batch, peer in chosen:
        if peer == "one-process" and table != options.table[0]:
            continue  # wanma against itself: the tables do not differ
        steps = options.steps or max(10 if precision == "bf16" else 6, 32 // batch)
        yield Setting(
            table="a" if peer == "one-process" else table,
            peer=peer,
            precision=precision,
            compile=compiled == "yes",
            batch=batch,
            ranks=options.ranks,
            preset=options.preset,
            vocabulary=options.vocabulary,
            sequence=options.sequence,
            warmup=options.warmup,
            steps=steps,
        )


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "train")
    add = parser.add_argument
    add("--table", nargs="+", choices=["a", "b"], default=["a", "b"], help="quick start, or same switches")
    add("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    add("--peer", nargs="+", choices=list(PEERS), default=list(PEERS))
    add("--batch", nargs="+", type=int, default=[8], metavar="N", help="sequences per rank (default 8)")
    add("--compile", nargs="+", choices=["no", "yes"], default=["no"], help="for wanma and the peer alike")
    add("--ranks", type=int, default=2)
    add("--steps", type=int, help="measured steps (default by batch: some 5 to 9 seconds)")
    add("--warmup", type=int, default=2, help="steps before the measured ones (default 2)")
    add("--preset", default="gpt-17m", help="wanma's name of the model (default gpt-17m)")
    add("--vocabulary", type=int, default=8192)
    add("--sequence", type=int, default=256)
    options = parser.parse_args()
    if options.warmup < 1:
        parser.error("--warmup is at least 1: the window starts at the end of a step")
    return options


if __name__ == "__main__":
    main()
