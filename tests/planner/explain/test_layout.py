"""Ranks in a plan's explanation, equal to those of the runtime."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.explain.rank_layout import mesh_dimensions, rank_contents, ranks_of_group, stage_layouts

DIMENSIONS = DecoderConfig(8, 64, 8, 4, 192, 320)
sizes = st.sampled_from([1, 2, 4])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp, virtual = draw(st.sampled_from([1, 2, 4])), 1
    schedule = draw(st.sampled_from(["1f1b", "interleaved_1f1b", "zbv"])) if pp > 1 else "1f1b"
    if schedule != "1f1b":
        virtual = 2
    count = pp * virtual
    shard = draw(st.sampled_from([1, 2]))
    tp = draw(sizes)
    return Plan(
        pp=pp,
        dp_replicate=draw(sizes),
        dp_shard=shard,
        cp=draw(st.sampled_from([1, 2])),
        tp=tp,
        shard="parameters" if shard > 1 else "none",
        sequence_parallel=tp > 1 and draw(st.booleans()),
        cp_method=draw(st.sampled_from(["ring", "all_to_all"])),
        schedule=schedule,  # type: ignore[arg-type]
        virtual_stages=virtual,
        stage_cuts=tuple(range(8 // count, 8, 8 // count)),
    )


@given(plans())
@settings(max_examples=60, deadline=None)
def test_every_block_is_held_by_one_stage_and_every_rank_holds_the_stages_its_plan_gives(plan: Plan) -> None:
    found = stage_layouts(plan, 8)
    assert [block for stage in found for block in stage.blocks] == list(range(8))
    assert [stage.has_embedding for stage in found] == [True] + [False] * (len(found) - 1)
    assert [stage.has_head for stage in found] == [False] * (len(found) - 1) + [True]
    for rank in range(plan.world_size):
        mine = {stage.number for stage in found if rank in stage.ranks}
        assert mine == set(plan.stages_of_pipeline_rank(plan.coordinates(rank)["pp"]))


@given(plans())
@settings(max_examples=60, deadline=None)
def test_the_groups_of_an_axis_part_the_world_and_differ_in_that_axis_alone(plan: Plan) -> None:
    for axis in MESH_DIMS:
        groups = {ranks_of_group(plan, axis, rank) for rank in range(plan.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        for group in groups:
            places = [plan.coordinates(rank) for rank in group]
            assert [place.pop(axis) for place in places] == list(range(getattr(plan, axis)))
            assert all(place == places[0] for place in places)
    assert [axis.name for axis in mesh_dimensions(plan)] == [
        axis for axis in MESH_DIMS if getattr(plan, axis) > 1
    ]


@given(plans())
@settings(max_examples=60, deadline=None)
def test_tensor_ranks_together_hold_every_head_column_and_token_once(plan: Plan) -> None:
    held = [rank_contents(plan, DIMENSIONS, rank) for rank in ranks_of_group(plan, "tp", 0)]
    assert [head for one in held for head in one.heads] == list(range(8))
    assert [column for one in held for column in one.feed_forward] == list(range(192))
    assert [token for one in held for token in one.vocabulary] == list(range(320))
    for one in held:
        assert {head // 2 for head in one.heads} == set(one.kv_heads)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_positions_are_those_that_the_runtime_gives(plan: Plan) -> None:
    import torch

    from wanma.data.batch import Batch
    from wanma.parallel.context.sequence_shards import residual_positions

    tokens = torch.zeros(1, 64, dtype=torch.int64)
    batch = Batch((tokens,), tokens, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool))
    for rank in range(min(plan.world_size, 16)):
        expected = residual_positions(batch, plan, rank)
        held = [at for run in rank_contents(plan, DIMENSIONS, rank, 64).positions for at in run]
        assert held == (list(range(64)) if expected is None else expected.tolist())


def test_expert_groups_are_neighbours_on_the_data_axes() -> None:
    plan = Plan(pp=2, dp_replicate=2, dp_shard=2, tp=2, shard="parameters", ep=2)
    assert ranks_of_group(plan, "ep", 0) == (0, 2)
    assert ranks_of_group(plan, "ep", 3) == (1, 3)
    assert ranks_of_group(plan, "ep", 13) == (13, 15)
