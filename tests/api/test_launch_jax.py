"""wanma launch --framework jax: scripts with JAX itself, on one node and on two."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from support.command import Desk
from support.frameworks import command, needs, numpy_losses, read_metrics, read_printed, run_on_two_nodes
from support.networks import cable, named_hosts

pytestmark = [pytest.mark.full, pytest.mark.slow, needs("jax")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_processes_of_jax_sum_and_train_as_one_does(desk: Desk, ranks: int) -> None:
    options = ("--ranks", str(ranks), "--run-dir", "run")
    ran = desk.run(*command("jax", "jax_training.py", options=options))
    ran.check()
    losses = read_metrics(desk.folder / "run", ranks)
    for rank in range(ranks):
        mark = f"[rank {rank}] process {rank} of {ranks}: sum {sum(range(1, ranks + 1))}.0"
        assert losses[rank] == read_printed(ran.out, mark)
        assert losses[rank] == losses[0]
    assert losses[0] == pytest.approx(numpy_losses(), rel=1e-5)


@pytest.mark.root
def test_processes_of_jax_on_two_nodes_train_as_one_does(desk: Desk) -> None:
    with cable() as network, named_hosts(network):
        ended = run_on_two_nodes(desk, network, command("jax", "jax_training.py", options=("--ranks", "1")))
    assert [one.code for one in ended] == [0, 0], ended
    assert "the name of this host" not in ended[0].text + ended[1].text
    losses = read_metrics(desk.folder / "both", 2)
    for rank, ran in enumerate(ended):
        assert losses[rank] == read_printed(ran.out, f"[rank {rank}] process {rank} of 2: sum 3.0")
    assert losses[0] == losses[1] == pytest.approx(numpy_losses(), rel=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_jax_that_fails_ends_the_run_at_once_with_its_error(desk: Desk, rank: int) -> None:
    """JAX itself keeps a failed process for 5 minutes, and then aborts it."""
    start = time.monotonic()
    options = ("--ranks", "2", "--run-dir", "run")
    ran = desk.run(*command("jax", "jax_training.py", "fails", str(rank), options=options))
    ran.check(1)
    assert time.monotonic() - start < 200
    message = ran.text.partition("error: ")[2]
    assert message.startswith(
        f"rank {rank} (node 0, {socket.gethostname()}) failed: its process exited with code 1"
    )
    _, _, last_lines = message.partition("Traceback (most recent call last):\n")
    assert last_lines.startswith('  File "' + str(Path(__file__).parents[1] / "scripts" / "jax_training.py"))
    assert "\nValueError: no such column: prize\n" in last_lines
