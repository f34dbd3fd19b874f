"""wanma launch --framework tensorflow: scripts with TensorFlow itself, on one node and on two."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from support.command import Desk
from support.frameworks import (
    command,
    needs,
    numpy_losses,
    python_of,
    read_metrics,
    read_printed,
    run_on_two_nodes,
)
from support.networks import cable

pytestmark = [pytest.mark.full, pytest.mark.slow, needs("tensorflow")]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    return Desk(tmp_path, modules=tmp_path)


def test_the_environment_has_neither_wanma_nor_torch() -> None:
    site = python_of("tensorflow").parents[1] / "lib"
    packages = {path.name for path in site.glob("python*/site-packages/*")}
    assert "tensorflow" in packages
    assert not [name for name in packages if re.match("(torch|wanma)[.-]?", name)]


@pytest.mark.parametrize(("strategy", "ranks"), [("mirrored", 1), ("workers", 2)])
def test_a_strategy_trains_as_one_process_does(desk: Desk, strategy: str, ranks: int) -> None:
    """MirroredStrategy has two devices in one process; MultiWorkerMirroredStrategy has one in each of two."""
    options = ("--ranks", str(ranks), "--run-dir", "run")
    ran = desk.run(*command("tensorflow", "tensorflow_training.py", strategy, options=options))
    ran.check()
    losses = read_metrics(desk.folder / "run", ranks)
    for rank in range(ranks):
        assert losses[rank] == read_printed(ran.out, f"[rank {rank}] worker {rank}: 2 replicas")
        assert losses[rank] == losses[0]
    assert losses[0] == pytest.approx(numpy_losses(), rel=1e-5)
    if strategy == "workers":
        shown = desk.call("show", "run").out
        assert f"loss {losses[0][-1]:.4f}"[:9] in shown, shown
        assert "rank 1 (worker 1): processor time " in shown


@pytest.mark.root
def test_workers_on_two_nodes_train_as_one_process_does(desk: Desk) -> None:
    words = command("tensorflow", "tensorflow_training.py", "workers", options=("--ranks", "1"))
    with cable() as network:
        ended = run_on_two_nodes(desk, network, words)
    assert [one.code for one in ended] == [0, 0], ended
    losses = read_metrics(desk.folder / "both", 2)
    for rank, ran in enumerate(ended):
        assert losses[rank] == read_printed(ran.out, f"[rank {rank}] worker {rank}: 2 replicas")
    assert losses[0] == losses[1] == pytest.approx(numpy_losses(), rel=1e-5)


def test_a_worker_that_fails_is_named_with_its_task_and_error(desk: Desk) -> None:
    options = ("--ranks", "2", "--run-dir", "run")
    ran = desk.run(*command("tensorflow", "tensorflow_training.py", "workers", "fails", options=options))
    ran.check(1)
    message = ran.text.partition("error: ")[2]
    assert message.startswith(
        f"rank 1 (node 0, {socket.gethostname()}) failed: its process (worker 1) exited with code 1"
    )
    assert "\nValueError: no such column: prize\n" in message
    assert ran.text.count("error: ") == 1
    assert read_metrics(desk.folder / "run", 2)[1] == pytest.approx(numpy_losses(3), rel=1e-5)


def test_a_chief_trains_with_a_worker_and_a_parameter_server_beside_an_evaluator(desk: Desk) -> None:
    (desk.folder / "model").mkdir()
    options = ("--roles", "chief=1,worker=1,ps=1,evaluator=1", "--run-dir", "run")
    ran = desk.run(*command("tensorflow", "tensorflow_servers.py", "model", options=options))
    ran.check()
    assert "[rank 1] worker 0 serves" in ran.out
    assert "[rank 2] ps 0 serves" in ran.out
    chief = re.search(r"^\[rank 0\] chief: (\S+), weights (.*)$", ran.out, re.MULTILINE)
    assert chief is not None, ran.out
    assert chief[1] == "/job:ps/replica:0/task:0/device:CPU:0"
    assert [float(word) for word in chief[2].split()] == pytest.approx([1.0] * 4, abs=1e-3)
    loss = re.search(r"^\[rank 3\] evaluator: loss (.*)$", ran.out, re.MULTILINE)
    assert loss is not None, ran.out
    assert float(loss[1]) < 1e-5
    assert "ending worker 0, ps 0, evaluator 0" in ran.out
    assert "error: " not in ran.out
