"""Refusals: one message with the way out, and nothing changed."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import Desk, Training, assert_bitwise_equal, small_disk

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no job file": (("nothing.toml",), ("there is no job file nothing.toml", "own.toml")),
    "missing data": (("text.toml", "data.text=[nowhere]"), ("data.text[0]: 'nowhere' does not exist",)),
    "empty corpus": (
        ("text.toml", "data.text=[empty]"),
        ("data.text: the corpus is empty", "name files or folders with text"),
    ),
    "corpus without text": (
        ("text.toml", "data.text=[binary]"),
        (
            "data.text[0]: the corpus is empty: none of 1 files contains text (1 are binary)",
            "name files or folders with text",
        ),
    ),
    "sequence longer than corpus": (
        ("text.toml", "data.sequence_length=100000"),
        ("data.sequence_length: 100000 is too long for a text of", "lower data.sequence_length"),
    ),
    "unknown key": (
        ("text.toml", "train.stepz=3"),
        ("unknown key 'train.stepz'", "Did you mean 'train.steps'?"),
    ),
    "unknown key in the file": (
        ("typo.toml",),
        ("typo.toml:2: unknown key 'model.layerz'. Did you mean 'model.layers'?",),
    ),
    "precision typo": (
        ("text.toml", "train.precision=bf61"),
        ('train.precision = "bf61"', "fp64, fp32, bf16, fp16", "Did you mean 'bf16'?"),
    ),
    "no tokenizer": (("text.toml", "data.tokenizer=no.json"), ("data.tokenizer: 'no.json'",)),
    "sequence that context ranks cannot cut evenly": (
        ("text.toml", "parallel.cp=2", "data.sequence_length=30"),
        ("data.sequence_length = 30 cannot be split evenly: parallel.cp = 2", "a multiple of 4"),
    ),
    "batch smaller than data ranks": (
        ("text.toml", "train.global_batch=1"),
        ("train.global_batch = 1 gives 2 data ranks", "raise train.global_batch to at least 2"),
    ),
    "nodes that do not divide the ranks": (
        ("text.toml", "--nodes", "3", "--rendezvous", "127.0.0.1:29500"),
        ("the plan has 2 ranks, which is not a multiple of cluster.nodes = 3",),
    ),
    "nodes without a place to meet": (
        ("text.toml", "--nodes", "2"),
        ("cluster.nodes = 2 needs a rendezvous address", "--rendezvous HOST:PORT"),
    ),
    "sharding with nobody": (
        ("text.toml", "parallel.shard=optimizer"),
        ("parallel.shard = 'optimizer' needs more than one shard rank", "set parallel.dp_shard"),
    ),
    "statistics group that does not divide": (
        ("images.toml", "train.global_batch=20"),
        ("train.global_batch = 20 over 2 data ranks", "batch_norm_group = 32", "a multiple of 64"),
    ),
    "unknown tracker": (
        ("text.toml", "observe.trackers=[wanbd]"),
        ("observe.trackers: there is no tracker 'wanbd'", "Did you mean 'wandb'?"),
    ),
    "run directory below a file": (
        ("text.toml", "--run-dir", "text.toml/run"),
        ("cannot write to the run directory text.toml/run: Not a directory", "--run-dir DIR"),
    ),
    "cache below a file": (
        ("text.toml", "data.cache=text.toml/cache"),
        ("cannot keep token files in text.toml/cache", "data.cache"),
    ),
}
"""Name -> (arguments of `wanma train`, what the message must hold)."""

REFUSED_BY_RANKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "factory that is not there": (
        ("own.toml", "model.factory=faulty:modell"),
        ("model.factory = 'faulty:modell': faulty has no 'modell'. Did you mean 'model'?",),
    ),
    "factory that fails inside": (
        ("own.toml", "model.factory=faulty:with_width", "model.arguments={width='eight'}"),
        (
            "model.factory = 'faulty:with_width' failed: TypeError: ",
            " in with_width: net.layers[0] = nn.Linear(4, width)",
            "for the full traceback run: python -c ",
        ),
    ),
    "data that cannot be asked by number": (
        ("own.toml", "data.factory=faulty:model"),
        ("data: Net is neither a map-style dataset",),
    ),
}


OF_FULL_SUITE = (
    "statistics group that does not divide",
    "factory that is not there",
    "data that cannot be asked by number",
)
"""Refusals that take seconds, and whose rules tests of their rooms hold every day."""


@pytest.fixture(scope="module")
def folder(desk: Desk) -> Path:
    """Names in the refused commands."""
    folder = desk.folder
    (folder / "empty").mkdir()
    (folder / "empty" / "a.txt").touch()
    (folder / "binary").mkdir()
    (folder / "binary" / "a.bin").write_bytes(bytes(range(256)) * 10)
    (folder / "typo.toml").write_text("[model]\nlayerz = 1\n")
    (folder / "images").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (folder / "images" / name).write_bytes(bytes(3073) * 20)
    (folder / "images.toml").write_text(
        '[model]\npreset = "resnet-18"\n[data]\nimages = "images"\n[parallel]\ndp_replicate = 2\n'
    )
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in OF_FULL_SUITE else name for name in REFUSED],
)
def test_refused_before_anything_is_started_or_written(desk: Desk, folder: Path, name: str) -> None:
    arguments, fragments = REFUSED[name]
    ran = desk.call("train", *arguments).check(2)
    for fragment in fragments:
        assert fragment in ran.told_once()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in OF_FULL_SUITE else name
        for name in REFUSED_BY_RANKS
    ],
)
def test_refused_by_the_ranks_in_the_words_of_the_job(desk: Desk, folder: Path, name: str) -> None:
    arguments, fragments = REFUSED_BY_RANKS[name]
    ran = desk.run("train", *arguments, "--run-dir", f"refused {name}").check(2)
    for fragment in fragments:
        assert fragment in ran.told_once()
    assert "rank 0 (" not in ran.text, "every rank says the same"
    assert "rank 1 (" not in ran.text


def test_cuda_where_there_is_none(desk: Desk) -> None:
    running = desk.start("train", "text.toml", "cluster.device=cuda", CUDA_VISIBLE_DEVICES="")
    ran = running.end()
    assert ran.code == 2
    assert "cluster.device = 'cuda'" in ran.told_once()
    assert "`wanma doctor` lists what was checked" in ran.text


@pytest.mark.root
def test_an_unreadable_file_is_named(desk: Desk, folder: Path) -> None:
    """As a user whom file permissions bind."""
    secret = folder / "secret.txt"
    secret.write_text("def f(): pass\n" * 100)
    secret.chmod(0)
    bound = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all")
    running = desk.start("train", "text.toml", "data.text=[secret.txt]", before=(*bound, "--reset-env"))
    ran = running.end()
    assert ran.code != 0
    assert "no permission to read" in ran.told_once()


@pytest.mark.root
def test_a_read_only_run_directory_is_named(desk: Desk) -> None:
    with small_disk(desk.folder / "frozen", "1m", "ro"):
        ran = desk.call("train", "text.toml", "--run-dir", "frozen/run")
    assert ran.code == 2
    assert "frozen/run: Read-only file system" in ran.told_once()


@pytest.fixture
def finished(desk: Desk, whole: Training, request: pytest.FixtureRequest) -> Training:
    """A copy of a finished run, which must be as good afterwards."""
    copy = desk.training(f"copy-{abs(hash(request.node.name))}")
    shutil.copytree(whole.path, copy.path)
    return copy


def test_a_checkpoint_of_another_model_is_refused_and_the_run_stays_what_it_was(
    desk: Desk, whole: Training, finished: Training
) -> None:
    shown = desk.call("show", finished.path.name).out
    ran = desk.run("train", "text.toml", "--run-dir", finished.path.name, "model.hidden=32")
    assert ran.code == 1
    assert "model.hidden = 16 → 32" in ran.told_once()
    assert "model.hidden was 16, and is 32" in ran.text
    assert "--run-dir DIR" in ran.text
    assert_bitwise_equal(finished.state(), whole.state())
    assert (finished.path / "job.toml").read_text() == (whole.path / "job.toml").read_text()
    desk.call("sample", finished.path.name, "--prompt", "def ", "--tokens", "2").check()
    again = desk.call("show", finished.path.name).out
    assert again.startswith(f"{finished.path.name}: Finished: 60 of 60 steps.")
    assert again.startswith(shown.rstrip("\n")), "what it said before, and a note"
    note = again.removeprefix(shown.rstrip("\n"))
    assert "failed before its first step" in note
    assert "model.hidden was 16, and is 32" in note
    listed = desk.call("runs", "--runs", ".").out
    assert any(line.split()[:2] == [finished.path.name, "finished"] for line in listed.splitlines())


@pytest.mark.full
def test_other_data_is_refused_and_the_way_out_works(desk: Desk, folder: Path, finished: Training) -> None:
    (folder / "other.txt").write_text("for i in range(10): print(i)\n" * 300)
    name, override = finished.path.name, "data.text=[other.txt]"
    ran = desk.run("train", "text.toml", "--run-dir", name, override)
    assert ran.code == 1
    assert "on other data than the job" in ran.told_once()
    assert "checkpoint.start_from loads the weights" in ran.text
    new = desk.run(
        "train", "text.toml", "--run-dir", "from-there", override, "train.steps=2",
        "data.validation_fraction=0", f"checkpoint.start_from={name}/checkpoints/step-00000060",
    )  # fmt: skip
    new.check()
    assert f"weights from {name}/checkpoints/step-00000060" in new.out


def test_a_fresh_start_keeps_the_older_checkpoints_apart(
    desk: Desk, whole: Training, finished: Training
) -> None:
    ran = desk.run("train", "text.toml", "--run-dir", finished.path.name, "--fresh", "train.steps=7")
    assert ran.code == 0
    assert finished.checkpoints() == ["step-00000005", "step-00000007"]
    assert finished.losses[0] == whole.losses[0]
    assert len(finished.losses) == 7
    aside = finished.path / "checkpoints-before-1"
    assert f"checkpoints are kept in {aside}" in ran.out
    assert f"run directory: {finished.path.name}\n" in ran.out
    assert sorted(path.name for path in aside.iterdir()) == whole.checkpoints()


def test_a_run_that_has_ended_says_so(desk: Desk, whole: Training, finished: Training) -> None:
    ran = desk.run("train", "text.toml", "--run-dir", finished.path.name)
    assert ran.code == 0
    assert "step 60 of 60; raise train.steps" in ran.out
    assert finished.metrics == whole.metrics


@pytest.fixture
def stranger() -> Iterator[str]:
    """HOST:PORT where something else than wanma answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_rendezvous_port_that_is_taken_is_named(desk: Desk, stranger: str) -> None:
    ran = desk.run("train", "text.toml", "--run-dir", "taken", "--nodes", "2", "--rendezvous", stranger)
    assert ran.code == 1
    assert f"{stranger} is not a coordinator" in ran.told_once()
    assert "a free port for cluster.rendezvous" in ran.text
