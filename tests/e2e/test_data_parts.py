"""Training by the command line from text of which each of two nodes has a part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from support.command import Desk, Ran
from support.nodes import Machines

JOB = """\
[model]
family = "decoder"
layers = 1
hidden = 16
heads = 2
dropout = 0.1

[data]
text = {entries}
placement = "parts"
sequence_length = 16
validation_fraction = 0.2
cache = "cache"

[train]
steps = {steps}
schedule = "constant"
precision = "fp64"
global_batch = 6
validation_samples = 8
validate_every_steps = 4

[parallel]
dp_replicate = {ranks}

[checkpoint]
every_steps = 4
"""


def write_job(desk: Desk, name: str, entries: list[str], steps: int, ranks: int) -> str:
    path = desk.folder / f"{name}.toml"
    path.write_text(JOB.format(entries=json.dumps(entries), steps=steps, ranks=ranks))
    return str(path)


def train_in_parts(desk: Desk, name: str, job: str) -> list[Ran]:
    """Train on two nodes, each of which is started in its own folder."""
    machines = Machines(desk, str(desk.folder / name), job, "cluster.nodes=2")
    for node in range(2):
        machines.start(node, before=("env", f"--chdir={desk.folder / f'node-{node}'}"))
    return machines.end()


@pytest.fixture(scope="module")
def nodes(desk: Desk) -> list[Path]:
    """Folders of two nodes, each with a `corpus` of its own."""
    folders = [desk.folder / f"node-{node}" for node in range(2)]
    for node, folder in enumerate(folders):
        (folder / "corpus").mkdir(parents=True)
        for number in range(10 + 10 * node):
            text = f"def part_{node}_{number}(x):\n    return x + {number * (node + 3)}\n\n\n" * 8
            (folder / "corpus" / f"{number}.py").write_text(text)
    return folders


@pytest.fixture(scope="module")
def trained(desk: Desk, nodes: list[Path]) -> Desk:
    """Run `parted` of 8 steps on both nodes."""
    ended = train_in_parts(desk, "parted", write_job(desk, "parted", ["corpus"], 8, 2))
    assert [one.code for one in ended] == [0, 0], ended
    return desk


def test_two_nodes_train_on_the_samples_of_one_that_has_both_parts(trained: Desk, nodes: list[Path]) -> None:
    job = write_job(trained, "whole", [str(node / "corpus") for node in nodes], 8, 1)
    trained.run("train", job, "--run-dir", "whole").check()
    parted, whole = trained.training("parted"), trained.training("whole")
    assert parted.losses == pytest.approx(whole.losses, rel=1e-10)
    assert len(parted.validation_losses) == 2
    assert parted.validation_losses == pytest.approx(whole.validation_losses, rel=1e-10)
    assert "data: 2 parts (" in parted.messages
    assert "are handed over between nodes" in parted.messages
    assert "handed over" not in whole.messages


@pytest.mark.full
def test_in_an_interleaved_order_samples_are_computed_where_they_lie(
    trained: Desk, nodes: list[Path]
) -> None:
    job = Path(write_job(trained, "interleaved", ["corpus"], 8, 2))
    job.write_text(job.read_text().replace("placement", 'part_order = "interleaved"\nplacement'))
    assert [one.code for one in train_in_parts(trained, "interleaved", str(job))] == [0, 0]
    whole = Path(write_job(trained, "interleaved-whole", [str(node / "corpus") for node in nodes], 8, 1))
    whole.write_text(whole.read_text().replace("placement", 'part_order = "interleaved"\nplacement'))
    trained.run("train", str(whole), "--run-dir", "interleaved-whole").check()
    own = trained.training("interleaved")
    assert own.losses == pytest.approx(trained.training("interleaved-whole").losses, rel=1e-10)
    assert own.losses != pytest.approx(trained.training("parted").losses, rel=1e-3)
    assert "about 0% of the samples are handed over" not in trained.training("parted").messages


@pytest.mark.full
def test_a_resume_on_one_node_with_both_parts_has_the_same_order(trained: Desk, nodes: list[Path]) -> None:
    entries = [str(node / "corpus") for node in reversed(nodes)]
    shutil.copytree(trained.folder / "parted", trained.folder / "moved")
    trained.run("train", write_job(trained, "moved", entries, 14, 1), "--run-dir", "moved").check()
    trained.run("train", write_job(trained, "straight", entries, 14, 1), "--run-dir", "straight").check()
    moved = trained.training("moved")
    assert [step["step"] for step in moved.metrics] == list(range(1, 15))
    assert moved.losses == pytest.approx(trained.training("straight").losses, rel=1e-9)


def test_a_resume_without_a_part_names_the_files_that_are_missing(trained: Desk, nodes: list[Path]) -> None:
    shutil.copytree(trained.folder / "parted", trained.folder / "alone")
    job = write_job(trained, "alone", [str(nodes[0] / "corpus")], 14, 1)
    ran = trained.run("train", job, "--run-dir", "alone")
    assert ran.code != 0
    text = ran.told_once()
    assert "no node of this run has 'corpus'" in text
    assert "training samples)" in text


def test_a_node_without_any_part_is_refused(trained: Desk) -> None:
    ran = trained.run("train", write_job(trained, "none", ["nowhere"], 8, 1), "--run-dir", "none")
    assert ran.code != 0
    assert "this node has none of nowhere" in ran.told_once()
