"""The other commands on a run that has ended, one's own programs, and the examples as they are shipped."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import struct
import sys
import tomllib
from pathlib import Path

import pytest

from support.command import Desk, Ran, Training
from wanma.job.examples import list_examples
from wanma.observe.recorder import STEP_KEYS
from wanma.observe.units import number_text

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_finished_run_is_listed_shown_reported_and_sampled_from(desk: Desk, whole: Training) -> None:
    name = whole.path.name
    listed = desk.call("runs", "--runs", ".")
    assert (listed.code, listed.err) == (0, "")
    assert any(line.startswith(name) and "60/60" in line for line in listed.out.splitlines())
    shown = desk.call("show", name)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{name}: Finished: 60 of 60 steps.")
    reported = desk.call("report", name)
    assert Path(desk.folder / reported.out.strip()).read_text().startswith("<!doctype html>")
    sample = ("sample", name, "--prompt", "def ", "--tokens", "8", "--temperature", "0")
    sampled = desk.run(*sample)
    assert (sampled.code, sampled.err) == (0, "")
    assert sampled.out.startswith("def ")
    assert desk.call(*sample).out == sampled.out


def test_the_perplexity_of_text_is_recorded_and_shown(desk: Desk, whole: Training, printed: str) -> None:
    (event,) = whole.validations
    assert event["perplexity"] == math.exp(event["loss"])
    perplexity = f"perplexity {number_text(event['perplexity'])}"
    assert f"validation loss {number_text(event['loss'])}, {perplexity} (step 60)\n" in printed
    assert perplexity in desk.call("show", whole.path.name).out
    assert perplexity in (whole.path / "report.html").read_text()


@pytest.mark.full
def test_a_newer_torch_than_any_tried_is_named_once_and_trains(desk: Desk) -> None:
    pretended = desk.folder / "pretended"
    metadata = pretended / "torch-2.16.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.16.0\n")
    path = os.pathsep.join(filter(None, [str(pretended), os.environ.get("PYTHONPATH")]))
    ran = desk.start("train", "text.toml", "--run-dir", "newer", "train.steps=2", PYTHONPATH=path).end()
    ran.check()
    assert ran.text.count("torch 2.16.0: newer than any tried here: 2.15") == 1


def test_the_schema_and_the_machine_are_told(desk: Desk) -> None:
    job = desk.call("job")
    assert (job.code, job.err) == (0, "")
    assert "hang_timeout_seconds" in job.out
    doctor = desk.call("doctor").check()
    assert "torch" in doctor.out


@pytest.mark.full
def test_ones_own_loop_runs_on_two_ranks(desk: Desk) -> None:
    script = str(EXAMPLES / "own_loop.py")
    desk.run("launch", "--run-dir", "own-loop", "--ranks", "2", script).check()
    training = desk.training("own-loop")
    assert [step["step"] for step in training.metrics] == list(range(1, 201))
    assert training.losses[-1] < training.losses[0] / 4
    assert "step-00000200" in training.checkpoints()


def test_a_script_that_fails_is_told_once(desk: Desk) -> None:
    script = desk.folder / "broken.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no such column: prize')\n"
    )
    ran = desk.run("launch", "--ranks", "2", "--run-dir", "broken", "broken.py")
    assert ran.code == 1
    assert ran.text.count("error: rank 1 (") == 1
    assert ran.text.count("Traceback") == 1


@pytest.mark.full
def test_a_model_and_data_of_ones_own_train_from_python(desk: Desk) -> None:
    running = desk.start_program([sys.executable, str(EXAMPLES / "custom_model.py")])
    ran = running.end().check()
    assert "sin(2) is off by 0.0" in ran.out
    assert desk.training("runs/custom-model").metrics[-1]["step"] == 400
    shutil.rmtree(desk.folder / "runs")


@pytest.mark.full
def test_daily_updates_rank_the_next_day_better_than_none(tmp_path: Path) -> None:
    files = [str(EXAMPLES / name) for name in ("recommender_daily.py", "recommender-daily.toml")]
    ran = Desk(tmp_path, modules=EXAMPLES).start_program([sys.executable, *files]).end().check()
    days = re.findall(r"AUC ([\d.]+) with updates, ([\d.]+) without", ran.out)
    assert len(days) == 2
    assert all(float(updated) > float(first) for updated, first in days)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Overrides with small data of what the examples ask the user to fetch or to make, by its name there."""
    folder = tmp_path_factory.mktemp("images")
    cifar, mnist = folder / "cifar", folder / "mnist"
    cifar.mkdir()
    mnist.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = [bytes([label, *[label * 20] * 3072]) for label in range(10)]
        (cifar / f"{name}.bin").write_bytes(b"".join(rows))
    for part in ("train", "t10k"):
        images = struct.pack(">IIII", 0x803, 10, 28, 28) + bytes(10 * 28 * 28)
        (mnist / f"{part}-images-idx3-ubyte").write_bytes(images)
        (mnist / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 10) + bytes(range(10)))
    table = folder / "flowers.csv"
    table.write_text(
        "sepal_length,sepal_width,petal_length,species\n"
        + "".join(f"5.{row % 10},3,{row % 3},{'abc'[row % 3]}\n" for row in range(600))
    )
    clicks = folder / "clicks.csv"
    clicks.write_text("user,item,click\n" + "".join(f"{row % 7},{row % 5},{row % 2}\n" for row in range(60)))
    criteo = folder / "train.txt"
    criteo.write_text("".join("\t".join(["1", *["3"] * 13, *["68fd1e64"] * 26]) + "\n" for _ in range(60)))
    return {
        "days/day-1.csv": f"data.path={clicks}",
        "data/criteo/train.txt": f"data.path={criteo}",
        "data/cifar-10-batches-bin": f"data.images={cifar}",
        "data/mnist": f"data.images={mnist}",
        "flowers.csv": f"data.path={table}",
    }


DRY_RUNS = """\
import json, sys
from wanma.cli.main import main

# Reported by Python itself, before each start.
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec")
sys.addaudithook(lambda name, words: name in STARTS and print("starts", name, words[:2], flush=True))
for command in json.loads(sys.argv[1]):
    print("==", command[1], main(command), flush=True)
"""
"""Program that runs commands one after another in one process, and prints what they start."""


@pytest.fixture(scope="module")
def dry_runs(desk: Desk, data: dict[str, str]) -> tuple[Ran, dict[str, str]]:
    """Dry runs of text.toml on two shards and of each example, or its plan; output by job file."""
    sharded = ("parallel.dp_replicate=1", "parallel.dp_shard=2")
    commands = [["train", "text.toml", "--dry-run", "--run-dir", "dry", *sharded]]
    for example in list_examples():
        first = shlex.split(example.commands[0])
        overrides = [override for name, override in data.items() if f'"{name}"' in example.text]
        if "--cluster" in first:  # a plan for machines that are not here
            commands.append(["plan", str(example.file), *first[3:]])
        elif example.file.suffix == ".toml":
            commands.append(["train", str(example.file), "--dry-run", *overrides])
    ran = desk.start_program([sys.executable, "-c", DRY_RUNS, json.dumps(commands)]).end()
    parts = re.split(r"^== (.*) (\d+)\n", ran.out, flags=re.MULTILINE)
    assert parts[1::3] == [command[1] for command in commands], ran.text
    assert set(parts[2::3]) == {"0"}, ran.text
    return ran, dict(zip(parts[1::3], parts[0:-1:3], strict=True))


def test_a_dry_run_starts_and_writes_nothing(desk: Desk, dry_runs: tuple[Ran, dict[str, str]]) -> None:
    ran, shown = dry_runs
    assert (ran.code, ran.err) == (0, "")
    assert "dp_shard 2" in shown["text.toml"]
    assert "fork_server" not in ran.out
    assert not (desk.folder / "dry").exists()


def test_every_example_is_a_job_that_could_start(dry_runs: tuple[Ran, dict[str, str]]) -> None:
    ran, shown = dry_runs
    assert (ran.code, ran.err) == (0, ""), ran.text
    assert all("ranks" in text for text in shown.values()), ran.text


def test_the_files_of_a_run_are_what_the_guide_says(whole: Training) -> None:
    names = {path.name for path in whole.path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoints", "environment.json", "events.jsonl", "job.toml", "logs", "metrics.jsonl",
        "plan.json", "report.html", "tokenizer",
    }  # fmt: skip
    job = tomllib.loads((whole.path / "job.toml").read_text())
    assert (job["train"]["steps"], job["observe"]["name"]) == (60, "text")
    assert json.loads((whole.path / "plan.json").read_text())["plan"]["dp_replicate"] == 2
    environment = json.loads((whole.path / "environment.json").read_text())
    assert environment["command_line"][:3] == ["wanma", "train", "text.toml"]
    assert [step["step"] for step in whole.metrics] == list(range(1, 61))
    assert all(set(STEP_KEYS) <= step.keys() for step in whole.metrics)
    assert {path.name for path in (whole.path / "logs").iterdir()} == {
        "node-0.jsonl", "rank-0.log", "rank-1.log",
    }  # fmt: skip
