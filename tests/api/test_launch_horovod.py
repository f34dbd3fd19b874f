"""wanma launch --framework horovod: a script with Horovod itself, on one node and on two."""

from __future__ import annotations

import signal

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
from support.networks import cable, named_hosts

# Building Horovod takes longer than continuous integration may: make horovod.
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, needs("horovod")]


@pytest.mark.parametrize("restarts", [0, 1])
def test_processes_of_horovod_train_as_one_does_also_after_a_death(desk: Desk, restarts: int) -> None:
    options = ("--ranks", "2", "--run-dir", "run", "--max-restarts", str(restarts))
    words = ["dies"] if restarts else []
    ran = desk.run(*command("horovod", "horovod_training.py", *words, options=options))
    ran.check()
    printed = [
        read_printed(ran.out, f"[rank {rank}] process {rank} of 2, {rank}/2 here, 0/1 across: sum 3.0")
        for rank in (0, 1)
    ]
    assert printed[0] == printed[1] == pytest.approx(numpy_losses(), rel=1e-5)
    assert ran.text.count("the ranks of all nodes restart") == restarts
    if not restarts:
        assert read_metrics(desk.folder / "run", 2) == printed


@pytest.mark.parametrize("is_executed", [True, False])
@pytest.mark.parametrize(
    ("word", "cause"), [("fails", "ValueError: no such column: prize"), ("dies", signal.SIGKILL.name)]
)
def test_the_process_that_failed_is_named_and_none_that_lost_it(
    desk: Desk, word: str, cause: str, is_executed: bool
) -> None:
    """The other process fails, too, as Horovod shuts down; often it is the first to say so."""
    options, python = ("--ranks", "2", "--run-dir", "run"), str(python_of("horovod"))
    words = command("horovod", "horovod_training.py", word, options=options)
    if is_executed:
        ran = desk.run(*words)
    else:
        own = [one for one in words if one not in ("--python", python)]
        ran = desk.start_program([python, "-m", "wanma", *own]).end()
    ran.check(1)
    message = ran.text.partition("error: ")[2]
    assert message.startswith("rank 1 (node 0, "), ran.text
    assert cause in message
    assert ran.text.count("error: rank") == 1


@pytest.mark.root
def test_processes_of_horovod_on_two_nodes_train_as_one_does(desk: Desk) -> None:
    words = command("horovod", "horovod_training.py", options=("--ranks", "2"))
    with cable() as network, named_hosts(network):  # Horovod ignores the interface for its process sets
        ended = run_on_two_nodes(desk, network, words)
    assert [one.code for one in ended] == [0, 0], ended
    for rank in range(4):
        place = f"{rank % 2}/2 here, {rank // 2}/2 across"
        mark = f"[rank {rank}] process {rank} of 4, {place}: sum 10.0"
        assert read_printed(ended[rank // 2].out, mark) == pytest.approx(numpy_losses(), rel=1e-5)
