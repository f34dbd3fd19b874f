"""Two nodes of one rank each keep each other's snapshots, and one of them is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.compare import equal
from support.images import Held
from support.ranks import Outcome, run_job
from support.recovering import messages
from support.text import DECODER, text_job
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import Restart

PLAN = Plan(dp_shard=2, shard="parameters", micro_batch=3)
RESTART = Restart("node 1 (host) was lost", 0.0, 3, 1)


def job(folder: Path, partner: Any = "auto", snapshots: Any = 1, every_steps: int = 0) -> dict[str, Any]:
    saved = {"every_steps": every_steps, "in_memory_every_steps": snapshots, "partner": partner}
    train = {"steps": 6, "global_batch": 6, "deterministic": True, "schedule": "constant"}
    text, model = Path(__file__).parent, {**DECODER, "dropout": 0.1}
    return text_job(folder, model, text=text, sequence_length=32, checkpoint=saved, **train)


class Nodes:
    """In-memory checkpoints of two nodes' supervisors: each its own rank's, and the other's."""

    def __init__(self) -> None:
        self.own, self.kept = Held(2), Held(2)
        """Both by the rank that left the image; rank 1's in `kept` are on node 0."""

    def workers(self, found: dict[int, Any] | None = None, step: int | None = None) -> dict[int, Any]:
        common = {"local_rank": 0, "local_world_size": 1, "local_world_sizes": (1, 1)}
        again = {"generation": 2, "restart": RESTART} if found is not None else {}
        return {
            rank: {
                "node_rank": rank,
                "memory_files": replace(
                    self.own.images(rank),
                    backup_paths={1 - rank: self.kept.images(1 - rank).own_paths},
                    restore_paths=found[rank] if found is not None else {},
                    restore_step=step,
                ),
                **common,
                **again,
            }
            for rank in range(2)
        }

    def without_node_1(self) -> dict[int, Any]:
        """In-memory checkpoints of each node after another machine has taken the place of node 1."""
        return {0: {0: self.own.images(0).own_paths, 1: self.kept.images(1).own_paths}, 1: {}}

    def steps_without_node_1(self) -> set[int]:
        return {head.step for head in self.own.heads(0)} & {head.step for head in self.kept.heads(1)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run that never fails; checkpoints on the way change none of its numbers."""
    folder = tmp_path_factory.mktemp("whole")
    return run_job(folder / "run", job(folder, snapshots="off"), PLAN)


def fail(folder: Path, text: dict[str, Any], patch: str) -> Nodes:
    nodes = Nodes()
    with pytest.raises(AssertionError, match="failed"):
        run_job(folder, text, PLAN, patch=f"support.faults:{patch}", workers=nodes.workers())
    return nodes


def test_a_lost_node_goes_on_from_its_partner_s_copy_as_if_nothing_had_happened(
    whole: Outcome, tmp_path: Path
) -> None:
    before = fail(tmp_path / "run", job(tmp_path), "rank_1_fails_in_step_4")
    step = max(before.steps_without_node_1())
    assert 1 <= step <= 3
    after = Nodes()
    workers = after.workers(before.without_node_1(), step)
    run = run_job(tmp_path / "run", job(tmp_path), PLAN, workers=workers)
    assert f'"source": "partner", "step": {step},' in messages(run)
    assert run.losses == whole.losses
    equal(whole, run)


def test_a_node_lost_with_its_copies_falls_back_to_disk_and_says_so(whole: Outcome, tmp_path: Path) -> None:
    text = job(tmp_path, every_steps=2)
    before = fail(tmp_path / "run", text, "rank_1_fails_in_step_4")
    step = before.own.heads(0)[0].step
    after = Nodes()
    workers = after.workers({0: {0: before.own.images(0).own_paths}, 1: {}}, step)
    run = run_job(tmp_path / "run", text, PLAN, workers=workers)
    assert f"step {step}, rank 1, is missing on node 1" in messages(run)
    assert '"source": "checkpoint", "step": 2,' in messages(run)
    assert run.losses == whole.losses


def test_no_snapshot_begins_before_partners_have_the_one_before(tmp_path: Path) -> None:
    nodes = fail(tmp_path, job(tmp_path), "rank_0_is_slow_to_exchange_and_rank_1_fails_in_step_4")
    assert nodes.own.steps() == {1}


@pytest.mark.full
def test_without_partners_every_step_has_its_snapshot(tmp_path: Path) -> None:
    nodes = fail(
        tmp_path, job(tmp_path, partner=False), "rank_0_is_slow_to_exchange_and_rank_1_fails_in_step_4"
    )
    assert nodes.own.steps() == {2, 3}
    assert [nodes.kept.heads(rank) for rank in range(2)] == [[], []]


def test_an_exchange_that_breaks_off_ends_the_copies_and_not_the_run(tmp_path: Path) -> None:
    nodes = Nodes()
    broken = "support.faults:rank_1_breaks_off_the_exchange"
    run = run_job(tmp_path, job(tmp_path), PLAN, patch=broken, workers=nodes.workers())
    assert "checkpoints are disabled: injected" in messages(run)
    assert run.steps[-1]["step"] == 6
    assert nodes.own.steps() == {4, 5}, "this node's go on"


def test_a_job_that_insists_on_partners_fails_without_them(tmp_path: Path) -> None:
    nodes = Nodes()
    broken = "support.faults:rank_1_breaks_off_the_exchange"
    with pytest.raises(AssertionError, match="checkpoints are disabled: injected"):
        run_job(tmp_path, job(tmp_path, partner=True), PLAN, patch=broken, workers=nodes.workers())


def test_one_node_cannot_have_a_partner(tmp_path: Path) -> None:
    held = Held(1)
    with pytest.raises(AssertionError, match="on one node, which has no partner"):
        run_job(
            tmp_path,
            job(tmp_path, partner=True),
            Plan(micro_batch=6),
            workers={0: {"memory_files": held.images(0)}},
        )
