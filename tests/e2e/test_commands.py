"""The other commands on a run that has ended, one's own programs, and the examples as they are shipped."""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
from pathlib import Path

import pytest

from support.command import Desk, Training

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_finished_run_is_listed_shown_reported_and_sampled_from(desk: Desk, whole: Training) -> None:
    name = whole.path.name
    listed = desk.run("runs", "--runs", ".")
    assert (listed.code, listed.err) == (0, "")
    assert any(line.startswith(name) and "60/60" in line for line in listed.out.splitlines())
    shown = desk.run("show", name)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith(f"{name}: Finished: 60 of 60 steps.")
    reported = desk.run("report", name)
    assert Path(desk.folder / reported.out.strip()).read_text().startswith("<!doctype html>")
    sampled = desk.run("sample", name, "--prompt", "def ", "--tokens", "8", "--temperature", "0")
    assert (sampled.code, sampled.err) == (0, "")
    assert sampled.out.startswith("def ")


def test_a_dry_run_starts_and_writes_nothing(desk: Desk) -> None:
    running = desk.start("train", "text.toml", "--dry-run", "--run-dir", "dry")
    while running.process.poll() is None:
        assert not any("fork_server" in " ".join(one.cmdline()) for one in running.look())
        time.sleep(0.05)
    ran = running.end()
    assert (ran.code, ran.err) == (0, "")
    assert "dp_replicate 2" in ran.out
    assert not (desk.folder / "dry").exists()


def test_the_schema_and_the_machine_are_told(desk: Desk) -> None:
    job = desk.run("job")
    assert (job.code, job.err) == (0, "")
    assert "hang_seconds" in job.out
    doctor = desk.run("doctor")
    assert doctor.code == 0, doctor.text
    assert "torch" in doctor.out


def test_ones_own_loop_runs_on_two_ranks(desk: Desk) -> None:
    script = str(EXAMPLES / "own_loop.py")
    ran = desk.run("launch", "--run-dir", "own-loop", script, "--ranks", "2")
    assert ran.code == 0, ran.text
    training = desk.training("own-loop")
    assert [step["step"] for step in training.metrics] == list(range(1, 201))
    assert training.losses[-1] < training.losses[0] / 4
    assert "step-00000200" in training.checkpoints()


def test_a_script_that_fails_is_told_once(desk: Desk) -> None:
    script = desk.folder / "broken.py"
    script.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('no such column: prize')\n"
    )
    ran = desk.run("launch", "broken.py", "--ranks", "2", "--run-dir", "broken")
    assert ran.code == 1
    assert ran.text.count("error: rank 1 (") == 1
    assert ran.text.count("Traceback") == 1


def test_a_model_and_data_of_ones_own_train_from_python(desk: Desk) -> None:
    running = desk.start_program([sys.executable, str(EXAMPLES / "custom_model.py")])
    ran = running.end()
    assert ran.code == 0, ran.text
    assert "sin(2) is off by 0.0" in ran.out
    assert desk.training("runs/custom-model").metrics[-1]["step"] == 400
    shutil.rmtree(desk.folder / "runs")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Small data in the formats that the examples ask the user to fetch."""
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
    return {"data/cifar-10-batches-bin": str(cifar), "data/mnist": str(mnist)}


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.toml")))
def test_every_example_is_a_job_that_could_start(desk: Desk, data: dict[str, str], example: str) -> None:
    text = (EXAMPLES / example).read_text()
    overrides = [f"data.images={place}" for name, place in data.items() if f'"{name}"' in text]
    ran = desk.run("train", str(EXAMPLES / example), "--dry-run", *overrides)
    assert (ran.code, ran.err) == (0, ""), ran.text
    assert "ranks" in ran.out


def test_the_files_of_a_run_are_what_the_guide_says(whole: Training) -> None:
    names = {path.name for path in whole.path.iterdir() if not path.name.startswith(".")}
    assert names == {
        "checkpoints", "environment.json", "events.jsonl", "job.toml", "logs", "metrics.jsonl",
        "plan.json", "report.html", "tokenizer",
    }  # fmt: skip
    assert json.loads((whole.path / "plan.json").read_text())["plan"]["dp_replicate"] == 2
