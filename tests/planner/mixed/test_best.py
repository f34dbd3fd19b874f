"""The search for plans on unlike machines: as good as trying everything, and better than what it replaces."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
from benchmarks.planner.step_simulation import simulate_step
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fleets import START, costs, fleet
from support.problems import SMALL, job, problem
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.errors import JobError
from wanma.job.plan.placement import ReplicaPlacement, StagePlacement
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Shard
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.problem import build_problem
from wanma.planner.heterogeneous.costs import HeterogeneousCosts, placed_step_time
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware, build_heterogeneous_hardware
from wanma.planner.heterogeneous.placement_search import PlacedGroup, placed_plan, search_placements
from wanma.planner.heterogeneous.replica_shapes import (
    HeterogeneousSpace,
    ReplicaShape,
    ReplicaShapes,
    StageSegment,
)
from wanma.planner.heterogeneous.stage_placement import PlacedReplicas, StagePlacer

TINY = HeterogeneousSpace(tp=(1, 2), stage_counts=(1, 2, 3), micro_batch=(1, 2), recompute=("none", "full"))


# ------------------------------------------------------------------ beside trying everything


def everything(of: HeterogeneousCosts, space: HeterogeneousSpace, batch: int) -> float:
    """The least time of a step over all sets of groups, options of each and shares of the batch."""
    placer, best = StagePlacer(of), math.inf
    for shard in space.shard:
        for number in (1, 2):  # replicas that span both kinds leave devices of one at most
            for kinds in itertools.combinations([(0,), (1,), (0, 1)], number):
                for options in itertools.product(
                    *(list(options_of(of.hardware, space, kind)) for kind in kinds)
                ):
                    groups = placed_groups(placer, options, shard, batch)
                    if groups is not None:
                        best = min(best, best_shares(groups, batch))
    return best


def options_of(
    of: HeterogeneousHardware, space: HeterogeneousSpace, kinds: tuple[int, ...]
) -> Iterator[ReplicaShape]:
    for order in itertools.permutations(kinds):
        for stages in itertools.product(space.stage_counts, repeat=len(order)):
            for tps in itertools.product(space.tp, repeat=len(order)):
                segments = tuple(map(StageSegment, order, tps, stages))
                alright = sum(stages) in space.stage_counts and sum(stages) <= SMALL.layers + 2
                if alright and all(of.pools[one.pool].devices_per_node % one.tp == 0 for one in segments):
                    for size, recompute in itertools.product(space.micro_batch, space.recompute):
                        yield ReplicaShape(segments, size, recompute)


def placed_groups(
    placer: StagePlacer, options: tuple[ReplicaShape, ...], shard: Shard, batch: int
) -> list[PlacedReplicas] | None:
    """Place options that span kinds first, as many as there are devices for; then the others on the rest."""
    left = [kind.device_count for kind in placer.costs.hardware.pools]
    found = []
    for option in sorted(options, key=lambda option: -len(option.segments)):
        count = min([left[one.pool] // (one.tp * one.stage_count) for one in option.segments] + [batch])
        placed = placer.place(option, count, len(options), shard) if count else None
        if placed is None:
            return None
        for one in option.segments:
            left[one.pool] -= count * one.tp * one.stage_count
        found.append(placed)
    return found


def best_shares(groups: list[PlacedReplicas], batch: int) -> float:
    """Over every number of micro-batches of every group but the last, which does the rest."""
    if sum(one.replicas.count for one in groups) > batch:
        return math.inf
    sizes = [one.replicas.count * one.replicas.micro_batch for one in groups]
    best = math.inf
    for numbers in itertools.product(*(range(1, batch // size + 2) for size in sizes[:-1])):
        done = sum(number * size for number, size in zip(numbers, sizes, strict=False))
        counts = (*numbers, max(math.ceil((batch - done) / sizes[-1]), 1))
        counts = tuple(max(count, one.min_micro_batches) for count, one in zip(counts, groups, strict=True))
        if all(count <= one.max_micro_batches(1e9) for count, one in zip(counts, groups, strict=True)):
            best = min(best, max(one.seconds(count) for count, one in zip(counts, groups, strict=True)))
    return best


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([1.11e9, 1.16e9, 40e9]),
    st.sampled_from([1.09e9, 1.13e9, 1.18e9]),
    st.sampled_from([1e9, 20e9]),
    st.integers(8, 16),
)
def test_the_search_finds_what_trying_everything_finds(
    fast: int, slow: int, fast_bytes: float, slow_bytes: float, across: float, batch: int
) -> None:
    of = costs(fleet(fast, slow, fast_bytes=fast_bytes, slow_bytes=slow_bytes, across=across), batch=batch)
    expected = everything(of, TINY, batch)
    found = search_placements(of.problem, of.hardware, START, TINY, tolerance=0.0)
    if math.isinf(expected):
        assert found.candidates == ()
        return
    best = found.candidates[0]
    assert best.seconds == pytest.approx(expected, rel=1e-6)
    assert best.forecast.step == placed_step_time(of, best.plan, batch)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.001, 0.5))
def test_no_option_does_more_than_its_bound(number: int, seconds: float) -> None:
    of = costs(fleet(8, 8))
    for nodes in ((0,), (1,), (0, 1)):
        options = ReplicaShapes(of, HeterogeneousSpace(), nodes)
        at = number % len(options.samples_per_micro_batch)
        option = options[at]
        placed = StagePlacer(of).place(option, 1, 2, "optimizer")
        assert placed.max_micro_batches(seconds) <= options.max_micro_batches(seconds)[at]
        pace = StagePlacer(of).slowest_stage_bound(option, True)
        assert placed.max_micro_batches(seconds) <= options.max_micro_batches_at(at, seconds, pace)
        least = options.min_seconds(
            at, placed.min_micro_batches + 3, StagePlacer(of).slowest_stage_bound(option, True)
        )
        assert least <= placed.seconds(placed.min_micro_batches + 3) * (1 + 1e-9)


# ------------------------------------------------------------------ cuts


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([1, 2]))
def test_cuts_make_the_slowest_stage_as_fast_as_any_cuts_do(
    first: int, second: int, slow_first: bool, tp: int
) -> None:
    of = costs()
    nodes = (1, 0) if slow_first else (0, 1)
    option = ReplicaShape((StageSegment(nodes[0], 1, first), StageSegment(nodes[1], tp, second)), 1, "none")
    found = StagePlacer(of).replicas(option, 1, "optimizer")
    assert sum(place.blocks for place in found.places) == SMALL.layers

    def pace(sizes: tuple[int, ...]) -> float:
        places = tuple(replace(place, blocks=n) for place, n in zip(found.places, sizes, strict=True))
        return of.replica_pipeline(replace(found, places=places), "optimizer").slowest_stage_seconds

    stages = first + second
    possible = [
        sizes
        for sizes in itertools.product(range(SMALL.layers + 1), repeat=stages)
        if sum(sizes) == SMALL.layers and all(sizes[1:-1])
    ]
    assert of.replica_pipeline(found, "optimizer").slowest_stage_seconds == pytest.approx(
        min(map(pace, possible)), rel=1e-9
    )


def test_a_kind_with_little_memory_gets_fewer_blocks() -> None:
    option = ReplicaShape((StageSegment(0, 1, 1), StageSegment(1, 1, 1)), 4, "none")
    roomy = StagePlacer(costs()).replicas(option, 4, "none")
    blocks = [place.blocks for place in roomy.places]
    needed = costs().memory(roomy, "none", 2)[0].memory_bytes
    tight = StagePlacer(costs(fleet(fast_bytes=needed - 1))).replicas(option, 4, "none")
    assert [place.blocks for place in tight.places] == [blocks[0] - 1, blocks[1] + 1]
    assert StagePlacer(costs(fleet(fast_bytes=1e9))).replicas(option, 4, "none") is None


# ------------------------------------------------------------------ whole searches


def test_a_placed_plan_computes_the_whole_batch_and_gives_slow_devices_less() -> None:
    of = costs(fleet(outer=50e9, across=50e9), batch=37)
    best = search_placements(of.problem, of.hardware, START, TINY).candidates[0].plan
    assert sum(best.batch_shares) == 37
    by_kind = {
        one.places[0].node: best.batch_shares[sum(r.count for r in best.placement[:at])]
        for at, one in enumerate(best.placement)
    }
    assert by_kind[0] > by_kind[1]
    for at, one in enumerate(best.placement):
        first = sum(r.count for r in best.placement[:at])
        mine = best.batch_shares[first : first + one.count]
        assert max(mine) - min(mine) <= 1


@pytest.mark.parametrize(("batch", "expected"), [(12, (6, 6)), (10, (5, 5)), (7, (4, 3)), (2, (1, 1))])
def test_the_batch_is_split_within_what_each_group_can_do(batch: int, expected: tuple[int, int]) -> None:
    of = costs(batch=batch)
    shares = [
        PlacedGroup(PlacedReplicas(of, ReplicaPlacement(1, (StagePlacement(node, 4),), 2), 2, "none"), 3)
        for node in (0, 1)
    ]
    plan = placed_plan(START, shares, "none", batch)
    assert sorted(plan.batch_shares, reverse=True) == list(expected)


def test_a_mixed_plan_beats_each_kind_alone_and_even_shares_when_every_event_is_played() -> None:
    of = costs(batch=48)
    found = search_placements(of.problem, of.hardware, START, replace(TINY, micro_batch=(1, 2, 4)))
    best = found.candidates[0].plan
    alone = [one.plan for one in found.candidates if len(kinds_of(one.plan)) == 1]
    assert {kinds_of(plan) for plan in alone} == {(0,), (1,)}
    even = replace(
        best,
        batch_shares=(6,) * 8,
        placement=tuple(ReplicaPlacement(4, (StagePlacement(node, 4),), 2) for node in (0, 1)),
        dp_replicate=8,
        pp=1,
        tp=1,
    )
    seconds = [simulate_step(of, plan, 48) for plan in (best, *alone, even)]
    assert seconds[0] < 0.85 * min(seconds[1:])


def kinds_of(plan: Plan) -> tuple[int, ...]:
    return tuple(sorted({place.node for one in plan.placement for place in one.places}))


def test_where_no_kind_holds_the_model_alone_replicas_span_both() -> None:
    """One or two devices do not hold it, and neither kind has three."""
    of = costs(fleet(2, 2, fast_bytes=1.13e9, slow_bytes=1.13e9))
    found = search_placements(
        of.problem, of.hardware, START, replace(TINY, stage_counts=(1, 2, 3, 4), tp=(1,))
    )
    assert {kinds_of(one.plan) for one in found.candidates} == {(0, 1)}
    assert all(len(one.plan.placement[0].places) >= 3 for one in found.candidates)


def test_found_plans_are_a_forecast_only_and_travel() -> None:
    found = search_placements(problem(), fleet(2, 2), START, TINY)
    assert found.best is None
    assert all(one.unsupported_reason for one in found.candidates)
    assert found.pareto_front[0].seconds == found.candidates[0].seconds
    assert pickle.loads(pickle.dumps(found)) == found
    seconds = [one.seconds for one in found.candidates]
    assert seconds == sorted(seconds)


def test_a_kind_that_does_not_compute_in_the_precision_is_left_out() -> None:
    cluster = parse_shorthand("1x4 A100 SXM 40GB, 4x100G + 1x4 V100 SXM2 16GB, 4x100G")
    of_cluster = build_heterogeneous_hardware(cluster, 0.85)
    found = search_placements(problem(), of_cluster, START, TINY)
    assert {kinds_of(one.plan) for one in found.candidates} == {(0,)}
    old = build_heterogeneous_hardware(
        parse_shorthand("1x4 V100 SXM2 16GB, 4x100G + 1x4 V100 SXM2 32GB, 4x100G")
    )
    with pytest.raises(JobError, match=r"train.precision = 'bf16': .* \(V100"):
        search_placements(problem(), old, START, TINY)


def test_other_models_than_decoders_and_machines_without_devices_are_refused() -> None:
    with pytest.raises(JobError, match="decoders only"):
        search_placements(replace(problem(), dimensions=None), fleet(), START)
    with pytest.raises(JobError, match="without accelerators"):
        build_heterogeneous_hardware(
            parse_shorthand("2x8 A100 SXM 40GB, 4x100G + 2x64 cores EPYC 7742, 1x100G")
        )


# ------------------------------------------------------------------ the case that others published


OPT_350M = DecoderConfig(24, 1024, 16, 16, 2752, 50272, tie_embeddings=True)


def test_on_128_a100_and_384_v100_the_plan_beats_every_kind_alone_and_the_even_split() -> None:
    """As Sailor's evaluation (Strati et al. 2025) has them; every event is played."""
    cluster = parse_shorthand("16x8 A100 SXM 40GB, 4x100G + 48x8 V100 SXM2 16GB, 4x100G")
    asked = job(global_batch=2048, precision="fp16")
    workload = compute_decoder_workload(OPT_350M, 2048)
    of = build_problem(asked, cluster, workload, OPT_350M)
    start = replace(START, precision="fp16")
    space = HeterogeneousSpace(tp=(1, 2), stage_counts=(1, 2, 4), micro_batch=(1, 2, 4), shard=("optimizer",))
    everywhere = build_heterogeneous_hardware(cluster, 0.85)
    found = search_placements(of, everywhere, start, space)
    parts = HeterogeneousCosts(of, everywhere, start)
    best, *others = [one.plan for one in found.candidates]
    assert kinds_of(best) == (0, 1)
    assert {kinds_of(plan) for plan in others} >= {(0,), (1,)}
    even = replace(
        best,
        placement=(
            ReplicaPlacement(128, (StagePlacement(0, 24),), 1),
            ReplicaPlacement(384, (StagePlacement(1, 24),), 1),
        ),
        batch_shares=(4,) * 512,
    )
    played = [simulate_step(parts, plan, 2048) for plan in (best, *others, even)]
    assert played[0] < 0.8 * min(played[1:])
    assert found.candidates[0].seconds == pytest.approx(played[0], rel=0.02)
