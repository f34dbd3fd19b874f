"""Snapshots of a run: what a failure leaves in memory carries on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.compare import equal
from support.images import Held, workers
from support.ranks import Outcome, run_job
from support.recovering import RESTART, fail, job, messages, recover
from wanma.checkpoint.in_memory.memory_file import HEADER_BYTES
from wanma.job.plan.plan import Plan
from wanma.planner.memory.in_memory_checkpoints import MAX_OVERHEAD_SHARE
from wanma.training.checkpointing.in_memory_interval import AdaptiveInterval, ReplicationCost


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plan], Outcome]:
    """Runs that never fail, by their plans; checkpoints on the way change none of their numbers."""

    @cache
    def run_of(plan: Plan) -> Outcome:
        folder = tmp_path_factory.mktemp("whole")
        return run_job(folder / "run", job(folder, snapshots="off"), plan)

    return run_of


@pytest.mark.parametrize(
    ("plan", "patch"),
    [
        (Plan(micro_batch=3), "rank_0_fails_in_step_4"),
        (Plan(dp_replicate=2, micro_batch=3), "rank_1_fails_in_step_4"),
        (Plan(dp_shard=2, shard="parameters", micro_batch=3), "rank_1_fails_in_step_4"),
        (Plan(pp=2, micro_batch=3), "rank_0_fails_in_step_4"),
    ],
    ids=str,
)
@pytest.mark.daily(
    "1 rank (one process), fp32, cpu-rank_0_fails_in_step_4",
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu-rank_1_fails_in_step_4",
)
def test_a_run_that_goes_on_from_memory_ends_bitwise_as_one_that_never_failed(
    plan: Plan, patch: str, whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    held = Held(plan.world_size)
    fail(tmp_path / "run", job(tmp_path), plan, held, patch)
    assert held.steps() == {2, 3}
    run, _ = recover(tmp_path / "run", job(tmp_path), plan, held, 3)
    assert '"source": "memory", "step": 3,' in messages(run)
    assert run.losses == whole(plan).losses
    equal(whole(plan), run)


def test_no_rank_overwrites_what_a_rank_that_dies_in_mid_copy_still_needs(
    whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    held = Held(2)
    fail(tmp_path / "run", job(tmp_path), plan, held, "rank_0_dies_while_it_copies_step_3")
    assert {head.step for head in held.heads(0)} == {2}
    assert {head.step for head in held.heads(1)} == {2, 3}
    run, _ = recover(tmp_path / "run", job(tmp_path), plan, held, 2)
    assert '"source": "memory", "step": 2,' in messages(run)
    equal(whole(plan), run)


def test_a_damaged_snapshot_is_told_and_the_newest_checkpoint_is_taken(
    whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    text = job(tmp_path, every_steps=2)
    held = Held(2)
    fail(tmp_path / "run", text, plan, held, "rank_0_fails_in_step_4")
    held.flip(1, 3, HEADER_BYTES + held.heads(1)[0].content_bytes - 1)
    run, _ = recover(tmp_path / "run", text, plan, held, 3)
    assert "memory file of step 3, rank 1, is damaged" in messages(run)
    assert '"source": "checkpoint", "step": 2,' in messages(run)
    assert run.losses == whole(plan).losses
    equal(whole(plan), run)


def test_a_checkpoint_that_is_newer_than_the_snapshot_is_taken(
    whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    plan = Plan(micro_batch=6)
    text = job(tmp_path, snapshots=2, every_steps=3)
    held = Held(1)
    fail(tmp_path / "run", text, plan, held, "rank_0_fails_in_step_4")
    assert held.steps() == {2}
    run, _ = recover(tmp_path / "run", text, plan, held, 2)
    assert '"source": "checkpoint", "step": 3,' in messages(run)
    equal(whole(plan), run)


def test_a_run_that_was_to_start_anew_carries_on_after_a_failure(
    whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    plan = Plan(micro_batch=6)
    text = job(tmp_path, every_steps=2)
    text["checkpoint"]["resume"] = False
    held = Held(1)
    fail(tmp_path / "run", text, plan, held, "rank_0_fails_in_step_4")
    told = {0: {"generation": 2, "restart": RESTART}}
    run = run_job(tmp_path / "run", text, plan, workers=told)
    assert '"source": "checkpoint", "step": 2,' in messages(run)
    equal(whole(plan), run)


def test_a_snapshot_is_taken_up_by_another_plan(tmp_path: Path) -> None:
    text = job(tmp_path, precision="fp64")
    text["model"]["dropout"] = 0.0
    whole = run_job(tmp_path / "whole", text, Plan(micro_batch=6, precision="fp64"))
    held = Held(2)
    first = Plan(dp_shard=2, shard="parameters", micro_batch=3, precision="fp64")
    fail(tmp_path / "run", text, first, held, "rank_1_fails_in_step_4")
    after = Held(1)
    told = {0: {"memory_files": after.images(0, held, 3), "generation": 2, "restart": RESTART}}
    run = run_job(tmp_path / "run", text, Plan(micro_batch=6, precision="fp64"), workers=told)
    assert '"source": "memory", "step": 3,' in messages(run)
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    for name, tensor in whole.tensors().items():
        assert torch.allclose(tensor.double(), run.tensors()[name].double(), rtol=1e-9, atol=1e-11), name


def test_the_last_step_is_left_to_its_checkpoint(tmp_path: Path) -> None:
    held = Held(1)
    run_job(tmp_path / "run", job(tmp_path), Plan(micro_batch=6), workers=workers(held, [0]))
    assert held.steps() == {4, 5}


def test_snapshots_that_are_off_are_not_taken(tmp_path: Path) -> None:
    held = Held(1)
    run_job(tmp_path / "run", job(tmp_path, "off"), Plan(micro_batch=6), workers=workers(held, [0]))
    assert held.steps() == set()


def test_where_memory_is_short_all_ranks_do_without_and_the_user_is_told(
    whole: Callable[[Plan], Outcome], tmp_path: Path
) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    held = Held(2)
    run = run_job(
        tmp_path / "run",
        job(tmp_path, "auto"),
        plan,
        patch="support.faults:rank_1_has_no_memory_for_snapshots",
        workers=workers(held, range(2)),
    )
    told = "in-memory checkpoints are disabled: the memory files of this node's ranks need"
    assert messages(run).count(told) == 1
    assert held.steps() == set()
    assert run.losses == whole(plan).losses


def test_a_job_that_insists_on_snapshots_fails_without_memory(tmp_path: Path) -> None:
    held = Held(1)
    with pytest.raises(AssertionError, match=r"need .*, but only .* of memory are free"):
        run_job(
            tmp_path / "run",
            job(tmp_path, 2),
            Plan(micro_batch=6),
            patch="support.faults:rank_1_has_no_memory_for_snapshots",
            workers=workers(held, [0]),
        )


def test_state_on_disk_has_no_copy_in_memory(tmp_path: Path) -> None:
    held = Held(1)
    plan = Plan(micro_batch=6, offload_optimizer="disk")
    run = run_job(tmp_path / "run", job(tmp_path, "auto"), plan, workers=workers(held, [0]))
    assert "the plan keeps state on disk" in messages(run)
    assert held.steps() == set()
    with pytest.raises(AssertionError, match=r"set checkpoint\.in_memory_every_steps = 'off'"):
        run_job(tmp_path / "other", job(tmp_path, 3), plan, workers=workers(held, [0]))


def test_an_automatic_interval_is_chosen_once_it_is_known_and_told(tmp_path: Path) -> None:
    plan = Plan(dp_replicate=2, micro_batch=3)
    held = Held(2)
    run = run_job(tmp_path / "run", job(tmp_path, "auto"), plan, workers=workers(held, range(2)))
    assert "in-memory checkpoint every " in messages(run)
    assert held.steps()


def test_the_interval_is_told_again_after_a_recovery_only_where_it_is_another(tmp_path: Path) -> None:
    text, plan, held = job(tmp_path, "auto", steps=12), Plan(micro_batch=3), Held(1)
    patch = "support.faults:snapshots_may_come_every_five_steps"
    first = run_job(tmp_path / "first", text, plan, patch=patch, workers=workers(held, [0]))
    assert messages(first).count("in-memory checkpoint every 6 steps") == 1  # a fifth more than it had to be
    assert held.steps() == {1, 7}
    for step, told, then in ((7, 0, {8}), (1, 1, {2, 8})):
        after = Held(1)
        fields = {"memory_files": after.images(0, held, step), "generation": 2, "restart": RESTART}
        run = run_job(tmp_path / f"from-{step}", text, plan, patch=patch, workers={0: fields})
        assert messages(run).count("in-memory checkpoint every 6 steps") == told
        assert after.steps() == then  # the first at once, in either case


@given(st.floats(1e-6, 10), st.floats(1e-4, 100))
def test_a_chosen_interval_costs_at_most_one_percent_or_is_one_step(cost: float, step: float) -> None:
    interval = AdaptiveInterval()
    assert interval.update(cost, step)
    assert interval.steps is not None
    assert cost <= MAX_OVERHEAD_SHARE * step * interval.steps * (1 + 1e-9) or interval.steps == 1
    assert not interval.update(cost, step)


@pytest.mark.parametrize(
    ("before_ms", "now_ms", "chosen", "then"),
    [(1, 1, 1, 1), (10, 10, 12, 12), (10, 11, 12, 12), (10, 12.5, 12, 16), (10, 6, 12, 12), (10, 5, 12, 6)],
)
def test_an_interval_changes_only_when_it_is_too_short_or_twice_too_long(
    before_ms: float, now_ms: float, chosen: int, then: int
) -> None:
    interval = AdaptiveInterval()
    interval.update(before_ms / 1000, 0.1)
    assert interval.steps == chosen
    interval.update(now_ms / 1000, 0.1)
    assert interval.steps == then


def test_steps_beside_an_exchange_that_are_longer_are_its_cost() -> None:
    exchanges = ReplicationCost()
    exchanges.cpu_seconds = 0.1
    assert not exchanges.record_step(4.0, is_pending=False)
    assert exchanges.cost_seconds(4.0) == 0.1, "nothing is known of the network yet"
    exchanges.start()
    assert [exchanges.record_step(7.0, goes_on) for goes_on in (True, True, False)] == [True] * 3
    assert exchanges.has_new_cost
    assert not exchanges.record_step(4.0, is_pending=False)
    assert (exchanges.has_new_cost, exchanges.steps_since_replication) == (False, 1)
    assert exchanges.cost_seconds(4.0) == exchanges.slowdown_seconds(4.0) == 9.0
    assert exchanges.slowdown_seconds(0.0) == 0.0, "there is nothing to compare with"
    assert (exchanges.slowdown_seconds(6.9), exchanges.cost_seconds(6.9)) == (0.0, 0.1), "that may be noise"


class Link:
    """A simulated link between partners, and its clock: training's steps, and beside them a copy.

    Args:
        image_bytes: of a copy.
        rate: of the link, in bytes per second.
        gradient_bytes: that training sends in each step; the rest of the link is the copy's.
        delays: shares of a step by which the steps beside a copy are longer, in turn.
    """

    def __init__(
        self, image_bytes: float, rate: float, gradient_bytes: float, delays: Sequence[float]
    ) -> None:
        self.step_seconds = 0.5 + gradient_bytes / rate
        spare = rate - gradient_bytes / self.step_seconds
        self.exchange_steps = max(math.ceil(image_bytes / spare / self.step_seconds), 1)
        self.delays = delays
        self.lost = self.total = 0.0

    def step(self, beside: int | None) -> float:
        """Seconds of a step; `beside`: number of the steps of the same copy before; None: there is none."""
        longer = 0.0 if beside is None else self.step_seconds * self.delays[beside % len(self.delays)]
        self.lost += longer
        self.total += self.step_seconds + longer
        return self.step_seconds + longer


@pytest.mark.parametrize("rate", [1e6 / 8, 10e6 / 8, 100e6 / 8, 1e9 / 8, 10e9 / 8])
@pytest.mark.parametrize(
    "delays",
    [
        pytest.param([0.01], id="messages yield"),
        pytest.param([0.019], id="less than is noticed"),
        pytest.param([0.9], id="copies take half of the link"),
        pytest.param([0.0, 0.0, 0.5], id="one step of three is much longer"),
        pytest.param([0.0], id="copies cost nothing"),
    ],
)
def test_copies_over_any_link_cost_at_most_one_percent_in_the_long_run(
    rate: float, delays: list[float]
) -> None:
    """gpt-10m on two machines: 62 MB of state on each, 40 MB of gradients."""
    link = Link(62e6, rate, 40e6, delays)
    exchanges, interval = ReplicationCost(), AdaptiveInterval()
    alone: list[float] = []
    last, beside = 0, None
    for step in range(1, 6_000 + 40 * link.exchange_steps):
        if step == 2_000 + 20 * link.exchange_steps:
            link.lost = link.total = 0.0  # until then the interval may be being found out
        seconds = link.step(beside)
        goes_on = beside is not None and beside + 1 < link.exchange_steps
        if not exchanges.record_step(seconds, goes_on):
            alone.append(seconds)
        beside = beside + 1 if goes_on and beside is not None else None
        if exchanges.has_new_cost and alone:
            usual = median(alone[-20:])
            cost = exchanges.cost_seconds(usual)
            interval.update(cost, usual, exchanges.min_interval_steps)
        enough_alone = len(alone) >= 5 or exchanges.steps_since_replication >= 2
        if beside is None and step >= last + (interval.steps or 1) and enough_alone:
            last, beside = step, 0
            exchanges.start()
    assert link.lost <= MAX_OVERHEAD_SHARE * link.total * 1.001
    assert interval.steps is not None, "copies were made"
