"""Runs on a real Ray cluster: two nodes on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from support.command import Training
from support.networks import free_port
from support.paced_run import ENDLESS, FACTORY, Pace, last_start
from support.ray_cluster import RayCluster, needs_ray, ray_cluster
from support.run_state import describe_run
from support.waiting import wait_until
from wanma.job.errors import EXIT_INTERRUPTED, EXIT_USAGE
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report

pytestmark = [needs_ray, pytest.mark.timeout(400, func_only=True)]

JOB = """
[model]
factory = "{factory}"
[data]
text = ["{text}"]
sequence_length = 32
[train]
steps = {steps}
global_batch = 4
[parallel]
dp_replicate = 2
[checkpoint]
every_steps = 100000
[cluster]
engine = "ray"
device = "cpu"
threads_per_rank = 1
nodes = 2
[cluster.ray]
address = "{address}"
[observe]
console = "plain"
"""
STEPS = 200


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


class Paced:
    """A run whose ranks wait, without computing, before a step that the test has not allowed."""

    def __init__(self, cluster: RayCluster, folder: Path, name: str, forwards: int = 4) -> None:
        self.cluster, self.folder = cluster, folder / name
        self.folder.mkdir()
        self.run = RunDirectory(self.folder / "runs" / name)
        self.job = self.folder / f"{name}.toml"
        self.job.write_text(JOB.format(factory=FACTORY, text=__file__, address=cluster.address, steps=STEPS))
        self.pace = Pace(self.folder, forwards)

    def train(self, *words: str, code: int = 0) -> str:
        return self.cluster.wanma(self.folder, "train", str(self.job), *words, code=code)

    def ask(self, command: str, *words: str, code: int = 0) -> str:
        return self.cluster.wanma(self.folder, command, str(self.run.path), *words, code=code)

    def wait_for_nodes(self, nodes: int, starts: int = 1) -> None:
        """Wait until the run computes on so many nodes, after so many starts."""

        def is_reached() -> bool:
            current, is_there = last_start(self.run, nodes, starts)
            if current not in (0, nodes):  # a node joins or leaves the run after a step
                self.pace.allow_more(next(pauses))
            return is_there

        pauses = itertools.cycle((0, 0, 0, 0, 1))

        try:
            wait_until(is_reached, f"start {starts}, on {nodes} nodes", 180)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{describe_run(self.run)}") from error

    def wait_for_state(self, state: str) -> None:
        wait_until(lambda: self.ask("status").split(":")[1].split()[0].strip(",") == state, state)

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in read_report(self.run).steps["step"]]

    def weights(self) -> dict[str, torch.Tensor]:
        return Training(self.run.path).state(STEPS)


@pytest.fixture(scope="module")
def here(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> Paced:
    """The same job in one process of this machine."""
    run = Paced(cluster, tmp_path_factory.mktemp("here"), "here", ENDLESS)
    run.train("--engine", "local", "--nodes", "1", "parallel.dp_replicate=1")
    return run


def test_a_run_is_submitted_shown_and_equal_to_one_here(
    cluster: RayCluster, tmp_path: Path, here: Paced
) -> None:
    run = Paced(cluster, tmp_path, "two", ENDLESS)
    assert "2 of 2 usable nodes are free now" in run.train("--dry-run")
    assert not run.run.path.exists()
    assert f"finished at step {STEPS}" in run.train()
    assert "finished" in run.ask("status")
    assert "loss" in run.ask("logs", "--rank", "1")
    losses = [read_report(one.run).steps["loss"] for one in (run, here)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    cluster.assert_nothing_is_left(run.run.path)
    assert "WANMA_SECRET" not in run.run.engine.read_text()


@pytest.mark.full
def test_servers_and_workers_train_as_one_process(cluster: RayCluster, tmp_path: Path) -> None:
    words = ("model.factory=", "model.preset=gpt-1m", "train.optimizer=sgd", "train.steps=6")
    run = Paced(cluster, tmp_path, "served", ENDLESS)
    run.train(*words, "servers.count=2")
    alone = Paced(cluster, tmp_path, "alone", ENDLESS)
    alone.train(*words, "parallel.dp_replicate=1", "--engine", "local", "--nodes", "1")
    losses = [read_report(one.run).steps["loss"] for one in (run, alone)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    cluster.assert_nothing_is_left(run.run.path)


@pytest.mark.full
def test_a_cancelled_run_saves_leaves_nothing_and_resumes(
    cluster: RayCluster, tmp_path: Path, here: Paced
) -> None:
    run = Paced(cluster, tmp_path, "cancelled")
    run.train("-d")
    run.wait_for_nodes(2)
    assert run.train(code=EXIT_USAGE)  # it is in progress
    waiting = Paced(cluster, tmp_path, "waiting")
    waiting.train("-d")
    assert "pending" in waiting.ask("status")
    explained = waiting.ask("explain")
    assert "CPU: in use on 2 nodes" in explained
    run.ask("cancel")
    run.pace.allow()
    run.wait_for_state("cancelled")
    assert Training(run.run.path).checkpoints()
    waiting.wait_for_nodes(2)  # it has what the other gave back
    waiting.ask("cancel", "--now")
    assert "cancelled" in waiting.ask("status")
    cluster.assert_nothing_is_left(waiting.run.path)
    run.train()
    assert_close(run.weights(), here.weights(), rtol=1e-5, atol=1e-5)
    cluster.assert_nothing_is_left(run.run.path)


@pytest.mark.exhaustive
def test_a_removed_node_is_replaced_and_the_number_of_nodes_changes(
    cluster: RayCluster, tmp_path: Path, here: Paced
) -> None:
    run = Paced(cluster, tmp_path, "elastic")
    run.train("-d", "--nodes", "1..2", "parallel.dp_replicate=", "parallel=auto")
    run.wait_for_nodes(2)
    cluster.lose_node(1)
    run.wait_for_nodes(1, starts=2)
    cluster.start_node()
    run.wait_for_nodes(2, starts=3)
    run.ask("resize", "--nodes", "1")
    run.wait_for_nodes(1, starts=4)
    run.ask("resize", "--nodes", "2")
    run.wait_for_nodes(2, starts=5)
    run.pace.allow()
    run.wait_for_state("finished")
    assert run.steps == list(range(1, STEPS + 1)), "one history"
    assert_close(run.weights(), here.weights(), rtol=1e-3, atol=1e-4)
    cluster.assert_nothing_is_left(run.run.path)


@pytest.mark.exhaustive
def test_a_node_beyond_the_minimum_is_given_to_work_that_waits_for_it(
    cluster: RayCluster, tmp_path: Path
) -> None:
    run, other = Paced(cluster, tmp_path, "generous"), Paced(cluster, tmp_path, "other")
    run.train("-d", "--nodes", "1..2", "parallel.dp_replicate=", "parallel=auto")
    run.wait_for_nodes(2)
    other.train("-d", "--nodes", "1", "parallel.dp_replicate=1")
    run.wait_for_nodes(1, starts=2)
    other.wait_for_nodes(1)
    other.pace.allow()
    other.wait_for_state("finished")
    run.wait_for_nodes(2, starts=3)
    run.pace.allow()
    run.wait_for_state("finished")
    assert run.steps == list(range(1, STEPS + 1)), "one history"
    cluster.assert_nothing_is_left(run.run.path)


@pytest.mark.full
def test_what_cannot_start_is_one_error_and_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    run = Paced(cluster, tmp_path, "refused")
    absent = f"cluster.ray.address=127.0.0.1:{free_port()}"
    for words in ([absent], ["cluster.ray.resources={rack=1}"]):
        told = run.train(*words, code=EXIT_USAGE)
        assert told.count("error: ") == 1
        assert "Traceback" not in told
    assert not run.run.engine.exists()
    run.train("-d", "--nodes", "3", "parallel.dp_replicate=3")
    assert "it waits for 3 nodes" in run.ask("explain")
    run.ask("cancel")
    assert run.ask("attach", code=EXIT_INTERRUPTED)
    cluster.assert_nothing_is_left(run.run.path)
