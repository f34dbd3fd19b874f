"""Cost of a rank's death, beside torchrun with checkpoints and torchft, and of in-memory checkpoints.

    python benchmarks/recovery/run.py --part torchrun --ranks 2 --pairs 7 --minutes 4
    python benchmarks/recovery/run.py --part torchft --ranks 2
    python benchmarks/recovery/run.py --part in-memory      # no rank is killed: step time at each interval
    python benchmarks/recovery/run.py --part supervisor     # no rank is killed: CPU time of the supervisor
    python benchmarks/recovery/run.py                       # everything that is not measured yet
    python benchmarks/recovery/run.py --report

Every contender of a part takes its turn in each round. All train the same plain PyTorch module on the same
prepared tokens from the same weights; this process reads the record of steps that each writes, and sends
SIGKILL to the process of one rank. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file: find `benchmarks`

from benchmarks.common import Results, carry_out, common_parser, describe_environment, take_pairs
from benchmarks.recovery.contenders import PARTS, Contender, Setting, command, measure
from benchmarks.recovery.report import report
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.job.file.loading import load_job


def main() -> None:
    carry_out(parse(), run, report)


def run(options: argparse.Namespace) -> None:
    """Measure every chosen piece that lacks rounds."""
    results = Results(options.results)
    environment = describe_environment(options.venv)
    torchft = torchft_version(options.venv)
    for setting in settings(options):
        if setting.part == "torchft" and torchft is None:
            print(f"torchft is not installed in {options.venv}: left out")
            continue
        contenders = PARTS[setting.part]
        piece = results.piece(asdict(setting), options.fresh)
        piece["environment"] = environment
        if setting.part == "torchft":
            versions = {**environment["versions"], "torchft": torchft}
            piece["environment"] = {**environment, "versions": versions}
        piece["commands"] = {name: str(command(setting, who)) for name, who in contenders.items()}
        piece["job"] = setting.job("corpus.txt", "cache")
        print(f"{setting.part}, {setting.ranks} ranks: {len(piece['pairs'])} rounds so far", flush=True)
        with tempfile.TemporaryDirectory(prefix="wanma-bench-") as name:
            inputs = Path(name)
            prepare_inputs(inputs, setting)
            whole: dict[str, dict[str, Any]] = {}
            """Undisturbed run of each kind; the first of all warms the disk's cache."""
            complete = take_pairs(
                piece,
                {
                    name: partial(sample, setting, name, who, whole, inputs, options.venv)
                    for name, who in contenders.items()
                },
                options,
                save=lambda: results.save(report(results.pieces)),
            )
        if not complete:
            return


def sample(
    setting: Setting,
    name: str,
    contender: Contender,
    whole: dict[str, dict[str, Any]],
    inputs: Path,
    venv: Path,
) -> dict[str, Any]:
    """Run one contender once, beside the undisturbed run of its kind."""
    if contender.kind not in whole:
        print(f"  {contender.kind} without a kill, for its weights:", flush=True)
        whole[contender.kind] = measure(setting, contender, inputs, venv, kill=False)
    taken = measure(setting, contender, inputs, venv, kill=setting.kill_after > 0)
    untroubled = whole[contender.kind]
    taken["same_weights"] = taken.pop("digest") == untroubled["digest"]
    taken["final_loss_untroubled"] = untroubled["final_loss"]
    what = f"{taken['step_seconds'] * 1000:.0f} ms a step"
    if setting.kill_after:
        new, first = taken["new_step_seconds"], taken["first_step_seconds"]
        repeated = taken["repeated_steps"]
        what = f"{new:.2f} s to a new step, {first:.2f} s to the first, {repeated} repeated, {what}"
    same = "same weights" if taken["same_weights"] else "DIFFERENT WEIGHTS"
    print(f"  {name}: {what}, {same}, {taken['command_seconds']:.0f} s in all", flush=True)
    return taken


def prepare_inputs(folder: Path, setting: Setting) -> None:
    """Write a text, its token file in wanma's cache, and the same batches as an array for the peers."""
    import numpy as np

    corpus, path = folder / "corpus.txt", folder / "job.toml"
    corpus.write_text("".join(f"The square of {n} is {n * n}, its cube {n**3}.\n" for n in range(60_000)))
    path.write_text(setting.job(str(corpus), str(folder / "cache")))
    (folder / "task.json").write_text(json.dumps(setting.task()))
    loaded = load_job(path)
    prepare_job_data(loaded.data)
    rows = open_dataset(loaded.data, loaded.train).batch(range(setting.steps * setting.batch))
    tokens = np.concatenate([rows.inputs[0].numpy(), rows.targets.numpy()[:, -1:]], axis=1)
    shape = (setting.steps, setting.ranks, setting.batch // setting.ranks, setting.sequence + 1)
    np.save(folder / "tokens.npy", tokens.reshape(shape))


def torchft_version(venv: Path) -> str | None:
    found = next((venv / "lib").glob("python*/site-packages/torchft-*.dist-info"), None)
    return None if found is None else found.name.removesuffix(".dist-info").partition("-")[2]


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for ranks in options.ranks:
        for part in options.part:
            kills = part not in ("in-memory", "supervisor")
            if not kills and ranks != options.ranks[0]:
                continue
            # torchft's dead replica takes part again only when it has started: that takes some seconds.
            steps = {"torchrun": 40, "torchft": 70, "in-memory": 151, "supervisor": 171}[part]
            yield Setting(
                part=part,
                ranks=ranks,
                steps=options.steps or steps,
                kill_after=options.kill_after if kills else 0,
                warmup=0 if kills else 10,
                hidden=options.hidden,
                heads=4,
                layers=options.layers,
                sequence=options.sequence,
                batch=options.batch,
            )


def parse() -> argparse.Namespace:
    parser = common_parser(__doc__, "recovery")
    add = parser.add_argument
    add("--part", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    add("--ranks", nargs="+", type=int, default=[2, 4], help="default: 2 4; in-memory, supervisor: the first")
    add("--kill-after", type=int, default=25, metavar="STEP", help="half a step after this one (default 25)")
    add("--steps", type=int, help="of a run; default: enough to carry on after the kill")
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--sequence", type=int, default=256)
    add("--batch", type=int, default=8, help="samples per step, of all ranks (default 8)")
    options = parser.parse_args()
    if any(options.batch % ranks for ranks in options.ranks):
        parser.error("--batch must be a multiple of --ranks")
    return options


if __name__ == "__main__":
    main()
