"""Seconds from the command to the end of the first optimizer step: `wanma train` beside `torchrun`.

    python benchmarks/startup/run.py --ranks 2 8 --pairs 7
    python benchmarks/startup/run.py --report

Both train the same tiny plain PyTorch module on the same prepared tokens, from the same weights; the clock is
read by rank 0 after its first step. No process of an earlier command is alive: that is checked. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import (
    Results,
    carry_out,
    clean_environment,
    common_parser,
    describe_environment,
    describe_environments,
    ratios,
    rounds_text,
    run_command,
    sample_values,
    table,
    take_pairs,
    undisturbed,
    verdict,
)
from benchmarks.recovery.watch import read_lines
from wanma.bench.statistics.estimates import estimate
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.job.file.loading import load_job

STEPS = 2
"""Steps of a run; the second is not measured, because wanma's last step also saves the final checkpoint."""
SEQUENCE = 64
"""Tokens per sequence of the model in model.py, which only the contenders import."""
TIMEOUT_SECONDS = 300.0
SECONDS = "first_step_seconds"
WANMA = ("wanma", "train", "job.toml", "--run-dir", "run")
RECORD = "record.jsonl"
PEER = (
    *("benchmarks/startup/train_ddp.py", "--tokens", "tokens.npy", "--record", RECORD),
    *("--steps", str(STEPS)),
)


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen number of ranks that lacks pairs."""
    results = Results(options.results)
    environment = describe_environment(options.venv)
    for ranks in options.ranks:
        piece = results.piece({"ranks": ranks}, options.fresh)
        piece["environment"] = environment
        piece["commands"] = {"wanma": " ".join(WANMA), "peer": " ".join((*torchrun(ranks), *PEER))}
        print(f"{ranks} ranks: {len(piece['pairs'])} pairs so far", flush=True)
        with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
            inputs = Path(name)
            piece["job"] = job(ranks, "corpus.txt", "cache")
            prepare_inputs(inputs, ranks)

            wanma = partial(measure, "wanma", WANMA, inputs, options.venv)
            peer = partial(measure, "torchrun", (*torchrun(ranks), *PEER), inputs, options.venv)
            if len(undisturbed(piece)) < options.pairs:
                print("  warming the disk's cache and Python's, not counted:")
                wanma()
                peer()
            complete = take_pairs(
                piece,
                {"wanma": wanma, "peer": peer},
                options,
                save=lambda: results.save(report(results.pieces)),
            )
        if undisturbed(piece):
            print(f"  wanma: {verdict(piece, metric=SECONDS)}", flush=True)
        if not complete:
            return


def measure(name: str, arguments: Sequence[str], inputs: Path, venv: Path) -> dict[str, Any]:
    """Run one contender once.

    Raises:
        BenchmarkError: it failed, or left a process behind.
    """
    with tempfile.TemporaryDirectory(prefix="wanma-bench-") as temporary:
        folder = Path(temporary)
        places = {file: str(inputs / file) for file in ("job.toml", "tokens.npy")}
        places |= {file: str(folder / file) for file in ("run", RECORD)}
        finished = run_command(
            [places.get(argument, argument) for argument in arguments],
            clean_environment(venv),
            folder / "output.log",
            TIMEOUT_SECONDS,
        )
        steps = read_lines(folder / ("run/metrics.jsonl" if arguments[0] == "wanma" else RECORD))
    seconds = steps[0]["time"] - finished.started
    print(f"  {name}: {seconds:.2f} s to the end of step 1, {finished.seconds:.2f} s in all", flush=True)
    return {
        SECONDS: round(seconds, 4),
        "command_seconds": round(finished.seconds, 3),
        "losses": [step["loss"] for step in steps],
    }


def prepare_inputs(folder: Path, ranks: int) -> None:
    """Write a text, its token file in wanma's cache, and the same batches as an array for the peer."""
    import numpy as np

    corpus, path = folder / "corpus.txt", folder / "job.toml"
    corpus.write_text("".join(f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(20_000)))
    path.write_text(job(ranks, str(corpus), str(folder / "cache")))
    loaded = load_job(path)
    prepare_job_data(loaded.data)
    rows = open_dataset(loaded.data, loaded.train).batch(range(STEPS * ranks))
    tokens = np.concatenate([rows.inputs[0].numpy(), rows.targets.numpy()[:, -1:]], axis=1)
    np.save(folder / "tokens.npy", tokens.reshape(STEPS, ranks, SEQUENCE + 1))


def torchrun(ranks: int) -> tuple[str, ...]:
    return ("torchrun", "--standalone", f"--nproc-per-node={ranks}")


def job(ranks: int, corpus: str, cache: str) -> str:
    return f"""\
[model]
factory = "benchmarks.startup.model:TinyDecoder"

[data]
text = ["{corpus}"]
sequence_length = {SEQUENCE}
validation_fraction = 0.0
cache = "{cache}"

[train]
steps = {STEPS}
global_batch = {ranks}
learning_rate = 1e-3
schedule = "constant"
gradient_clip = 1.0

[[train.parameter_groups]]
match = "*"
weight_decay = 0.1

[parallel]
dp_replicate = {ranks}

[checkpoint]
every_steps = 0
"""


def report(pieces: Sequence[dict[str, Any]]) -> str:
    """Return all results as Markdown."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    rows = []
    for piece in sorted(measured, key=lambda piece: piece["settings"]["ranks"]):
        seconds = [estimate(sample_values(piece, who, SECONDS)).median for who in ("wanma", "peer")]
        losses = [f"{undisturbed(piece)[0][who]['losses'][0]:.6f}" for who in ("wanma", "peer")]
        rows.append(
            [
                str(piece["settings"]["ranks"]),
                *(f"{value:.2f}" for value in seconds),
                str(estimate(ratios(piece, metric=SECONDS))),
                rounds_text(piece),
                " / ".join(losses),
            ]
        )
    header = ["ranks", "wanma, s", "torchrun, s", "ratio (95 %)", "pairs", "loss of step 1, wanma / torchrun"]
    commands = dict.fromkeys(line for piece in measured for line in piece["commands"].values())
    return "\n".join(
        [
            "# Start-up: from the command to the end of the first optimizer step\n",
            "Ratio: wanma's seconds over torchrun's, median of the pairs with its 95 % bootstrap interval.\n",
            table(header, rows),
            "## Commands\n",
            "".join(f"    {line}\n" for line in commands),
            f"A `job.toml`:\n\n```toml\n{measured[0]['job']}```\n",
            "## Where and when\n",
            describe_environments(measured),
        ]
    )


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "startup")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 8], help="default: 2 8")
    return parser.parse_args()


if __name__ == "__main__":
    main()
