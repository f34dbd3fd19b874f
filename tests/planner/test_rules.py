"""Refusals of combinations before anything starts, with the keys and the way out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import Schedule
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.job_planner import build_layout, complete_plan
from wanma.planner.pipeline.schedules import invalid_micro_batches_reason
from wanma.planner.rules.mesh import check_mesh, check_model_dimensions

LAPTOP = Cluster((NodeGroup("laptop", 8, 16 << 30, ()),))
BOX = Cluster(
    (NodeGroup("box", 64, 512 << 30, (Device("cuda", "H100", 80 << 30, {"bf16": 989e12, "fp8": 1979e12}),)),)
)


def job(model: dict[str, Any] | None = None, **sections: Any) -> Job:
    return Job.model_validate({"model": model or {"preset": "gpt-1m"}, **sections})


def text(length: int) -> dict[str, Any]:
    return {"text": ["stdlib"], "sequence_length": length}


# ------------------------------------------------------------------ compressed gradients


def test_proofs_are_not_compressed() -> None:
    plan = Plan(dp_replicate=2, precision="fp64", compression_groups=(("*", "bf16"),))
    with pytest.raises(JobError, match=r"'bf16' with train\.precision = 'fp64'") as error:
        check_mesh(job(), plan, LAPTOP)
    assert "train.precision = 'fp32'" in error.value.hint


def test_ranks_that_multiply_out_a_sum_themselves_must_be_alike() -> None:
    unlike = Plan(dp_replicate=2, batch_shares=(1, 3), compression="powersgd")
    with pytest.raises(JobError, match=r"'powersgd' .*parallel\.batch_shares") as error:
        check_mesh(job(), unlike, LAPTOP)
    assert "'int8'" in error.value.hint
    two_kinds = Cluster((*LAPTOP.nodes, replace(LAPTOP.nodes[0], name="other")))
    with pytest.raises(JobError, match=r"2 kinds of nodes"):
        check_mesh(job(), replace(unlike, batch_shares=()), two_kinds)
    check_mesh(job(), replace(unlike, compression="int8"), LAPTOP)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"compression_share": 0.1}, "share = 0.1 .*'topk'"),
        ({"compression": "topk", "compression_rank": 2}, "rank = 2 .*'powersgd'"),
        ({"compression_from_step": 5}, "from_step = 5 .*compressed"),
    ],
)
def test_what_says_how_to_compress_is_not_dropped_where_nothing_does(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(JobError, match=rf"parallel\.compression_{says}"):
        check_mesh(job(parallel=given), Plan(), LAPTOP)
    both = [{"match": "*", "compression": kind} for kind in ("topk", "powersgd")]
    check_mesh(job(parallel={**given, "compression_groups": both}), Plan(), LAPTOP)


def test_a_job_that_asks_for_compression_gets_it_in_its_plan_by_name() -> None:
    asked = job(
        parallel={
            "dp_replicate": 2,
            "compression": "topk",
            "compression_share": 0.02,
            "compression_groups": [{"match": "*norm*", "compression": "none"}],
        }
    )
    plan = build_layout(asked, LAPTOP)
    assert (plan.compression, plan.compression_share, plan.approximate) == ("topk", 0.02, ("compression",))
    assert plan.compression_for_parameter("layers.0.norm.weight") == "none"
    assert plan.compression_for_parameter("layers.0.up.weight") == "topk"
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# ------------------------------------------------------------------ context parallel


@pytest.mark.parametrize(
    ("plan", "refused", "accepted"),
    [
        (Plan(cp=2), 6, 8),
        (Plan(cp=4), 20, 24),
        (Plan(cp=4, cp_method="all_to_all"), 22, 20),
        (Plan(cp=2, tp=2, sequence_parallel=True, cp_method="all_to_all"), 6, 8),
        (Plan(cp=2, tp=3, sequence_parallel=True), 18, 24),
    ],
    ids=str,
)
def test_context_ranks_want_a_sequence_that_they_can_cut_evenly(
    plan: Plan, refused: int, accepted: int
) -> None:
    check_mesh(job(data=text(accepted)), plan, LAPTOP)
    with pytest.raises(JobError, match=rf"_length = {refused} .*cp = {plan.cp}") as error:
        check_mesh(job(data=text(refused)), plan, LAPTOP)
    assert f"a multiple of {plan.sequence_length_multiple}" in error.value.hint


@pytest.mark.parametrize(
    ("model", "data", "fact"),
    [
        ({"preset": "resnet-18"}, {}, " .* images"),
        ({"family": "convnet"}, {"images": "digits.npz"}, " .* images"),
        ({"preset": "gpt-1m"}, {"images": "digits.npz"}, " .* images"),
        ({"factory": "mine:model"}, {}, ": mine:model"),
    ],
)
def test_images_and_a_factorys_model_have_no_sequence_to_share(
    model: dict[str, Any], data: dict[str, Any], fact: str
) -> None:
    with pytest.raises(JobError, match=f"parallel.cp = 2{fact}"):
        check_mesh(job(model, data=data), Plan(cp=2), LAPTOP)


def test_all_to_all_shares_heads_that_divide_and_a_ring_any() -> None:
    decoder = DecoderConfig(2, 48, 6, 2, 64, 320)
    check_model_dimensions(Plan(cp=4), decoder)
    check_model_dimensions(Plan(cp=3, tp=2, cp_method="all_to_all"), decoder)
    with pytest.raises(JobError, match=r"cp = 4 .*'all_to_all' .*heads = 6"):
        check_model_dimensions(Plan(cp=4, cp_method="all_to_all"), decoder)
    with pytest.raises(JobError, match=r"model.heads = 6 after parallel.tp = 2") as error:
        check_model_dimensions(Plan(cp=2, tp=2, cp_method="all_to_all"), decoder)
    assert "parallel.cp_method = 'ring'" in error.value.hint


# ------------------------------------------------------------------ tensor and sequence parallel


@pytest.mark.parametrize(
    ("plan", "refused", "accepted"),
    [(Plan(tp=2, sequence_parallel=True), 33, 34), (Plan(tp=3, sequence_parallel=True), 32, 33)],
    ids=str,
)
def test_tensor_ranks_want_a_sequence_that_they_can_share(plan: Plan, refused: int, accepted: int) -> None:
    check_mesh(job(data=text(accepted)), plan, LAPTOP)
    with pytest.raises(JobError, match=rf"_length = {refused} .*tp = {plan.tp}") as error:
        check_mesh(job(data=text(refused)), plan, LAPTOP)
    assert f"a multiple of {plan.tp}, or set parallel.sequence_parallel = false" in error.value.hint
    check_mesh(job(data=text(refused)), Plan(tp=plan.tp), LAPTOP)  # the activations are whole


@pytest.mark.parametrize(
    ("key", "size", "possible"),
    [("heads", 6, "1 or 2"), ("feed_forward", 90, "1 or 2"), ("vocabulary", 321, "1")],
)
def test_tensor_ranks_want_equal_shares_of_the_dimensions(key: str, size: int, possible: str) -> None:
    plan, given = Plan(tp=4), {"heads": 8, "kv_heads": 2, "feed_forward": 96, "vocabulary": 320}
    # Two key and value heads for four ranks are no hindrance.
    check_model_dimensions(plan, DecoderConfig(2, 48, **given))
    with pytest.raises(JobError, match=rf"tp = 4 .* model.{key} = {size}\n") as error:
        check_model_dimensions(plan, DecoderConfig(2, 48, **{**given, key: size}))
    assert error.value.hint == f"set parallel.tp to {possible}, or set model.{key} to a multiple of 4"


# ------------------------------------------------------------------ memory and low precision


@pytest.mark.parametrize("kind", ["parameters", "optimizer", "activations"])
def test_on_a_cpu_everything_is_in_the_hosts_memory_already(kind: str) -> None:
    asked = {f"offload_{kind}": "host"}
    with pytest.raises(JobError, match=rf"offload_{kind} = 'host'.*already") as error:
        check_mesh(job(parallel=asked), Plan(**asked), LAPTOP)
    assert "'disk'" in error.value.hint
    check_mesh(job(parallel={f"offload_{kind}": "disk"}), Plan(**{f"offload_{kind}": "disk"}), LAPTOP)
    check_mesh(job(parallel=asked), Plan(**asked, device="cuda"), BOX)


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_a_share_of_nothing_recomputes_nothing(mode: str) -> None:
    asked = job(parallel={"recompute": mode, "recompute_share": 0.5})
    with pytest.raises(JobError, match=r"parallel\.recompute_share = 0\.5"):
        check_mesh(asked, Plan(), LAPTOP)


def test_fp8_needs_gpus_that_compute_it_and_bf16_between() -> None:
    asked = job(train={"fp8": True, "precision": "bf16"})
    plan = Plan(fp8=True, precision="bf16", device="cuda")
    check_mesh(asked, plan, BOX)
    older = Cluster((NodeGroup("box", 8, 1 << 30, (Device("cuda", "A100", 40 << 30, {"bf16": 312e12}),)),))
    for wrong, cluster, fact in (
        (replace(plan, device="cpu"), LAPTOP, ": .*CPUs"),
        (replace(plan, precision="fp32"), BOX, " with .*'fp32'"),
        (plan, older, ": A100"),
    ):
        with pytest.raises(JobError, match=rf"train\.fp8{fact}"):
            check_mesh(asked, wrong, cluster)


# ------------------------------------------------------------------ experts


MIXTURE = DecoderConfig(
    4, 64, 4, 4, 128, 320, experts=6, experts_per_token=2, expert_feed_forward=36, dense_layers=1
)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        (Plan(dp_shard=4, shard="parameters", ep=3), "1 or 2 or 4"),
        (Plan(dp_replicate=2, dp_shard=3, shard="parameters", ep=2), "1 or 3 or 6"),
        (Plan(ep=2), "1"),
    ],
    ids=str,
)
def test_expert_ranks_are_cut_out_of_the_data_ranks(plan: Plan, sizes: str) -> None:
    with pytest.raises(JobError, match=rf"parallel.ep = {plan.ep} cannot split") as error:
        check_mesh(job({"preset": "gpt-moe-3m"}, train={"global_batch": 12}), plan, LAPTOP)
    assert f"parallel.ep to {sizes}, or" in error.value.hint


def test_expert_ranks_may_be_context_ranks_and_more_than_the_shards() -> None:
    for plan in (
        Plan(cp=2, ep=2),
        Plan(dp_shard=2, cp=2, shard="parameters", ep=4),
        Plan(dp_replicate=2, dp_shard=2, shard="parameters", ep=4),
        Plan(dp_replicate=6, ep=3),
    ):
        check_mesh(job({"preset": "gpt-moe-3m"}, data=text(16)), plan, LAPTOP)


@pytest.mark.parametrize("model", [{"preset": "resnet-18"}, {"factory": "models:build"}], ids=str)
def test_a_model_without_experts_cannot_spread_them(model: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"parallel.ep = 2: .* has no experts"):
        check_mesh(job(model), Plan(dp_replicate=2, ep=2), LAPTOP)


def test_a_dense_decoder_cannot_spread_experts() -> None:
    dense = replace(MIXTURE, experts=0, experts_per_token=0)
    with pytest.raises(JobError, match=r"parallel.ep = 2, .* no experts"):
        check_model_dimensions(Plan(dp_replicate=2, ep=2), dense)


def test_each_expert_rank_has_as_many_experts_as_the_others() -> None:
    check_model_dimensions(Plan(dp_replicate=12, ep=3), MIXTURE)
    with pytest.raises(JobError, match=r"ep = 4 .* model.experts = 6") as error:
        check_model_dimensions(Plan(dp_replicate=12, ep=4), MIXTURE)
    assert "parallel.ep to 1 or 2 or 3 or 6, or" in error.value.hint


def test_tensor_ranks_share_the_width_of_each_expert() -> None:
    check_model_dimensions(Plan(tp=2), MIXTURE)
    with pytest.raises(JobError, match=r"tp = 8 .*expert_feed_forward = 36"):
        check_model_dimensions(Plan(tp=8), replace(MIXTURE, heads=8, kv_heads=8))
    without_dense = replace(MIXTURE, dense_layers=0, feed_forward=33)  # which no block then has
    check_model_dimensions(Plan(tp=2), without_dense)


# ------------------------------------------------------------------ pipelines

DECODER = DecoderConfig(layers=6, hidden=64, heads=4, kv_heads=4, feed_forward=128, vocabulary=512)


def pipelined(**parallel: Any) -> Plan:
    """As planned for a decoder of 6 blocks and 16 samples per step."""
    asked = job(train={"global_batch": 16}, parallel={"pp": 2, **parallel})
    return complete_plan(
        asked, build_layout(asked, LAPTOP), LAPTOP, compute_decoder_workload(DECODER, 32), DECODER
    ).plan


@pytest.mark.parametrize(
    ("parallel", "says", "way_out"),
    [
        (
            {"virtual_stages": 2},
            r"virtual_stages = 2: schedule '1f1b'",
            "interleaved_1f1b or interleaved_zero_bubble",
        ),
        (
            {"schedule": "zbv", "virtual_stages": 3},
            r"virtual_stages = 3: schedule 'zbv'",
            "unset parallel.virtual_stages",
        ),
        (
            {"schedule": "interleaved_zero_bubble", "compile": True},
            r"'interleaved_zero_bubble' with parallel\.compile",
            "parallel.schedule = 'interleaved_1f1b'",
        ),
        (
            {"schedule": "dualpipev", "recompute": "full"},
            r"'dualpipev' with parallel\.recompute = 'full'",
            "parallel.recompute = 'none'",
        ),
        (
            {"pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 3},
            r"6 blocks cannot be split into 12 stages",
            "at most 8 stages",
        ),
        ({"stage_cuts": [1, 2]}, r"stage_cuts = \[1, 2\]: 2 stages need 1", "unset"),
        ({"stage_cuts": [7]}, r"stage_cuts = \[7\]: cuts must lie", "unset"),
        ({"pp": 3, "stage_cuts": [4, 2]}, r"cuts must increase: 2 comes after 4", "unset"),
        ({"pp": 3, "stage_cuts": [2, 2]}, r"stage 1 of 3 would be empty", "unset"),
        (
            {"schedule": "dualpipev", "micro_batch": 8},
            r"schedule 'dualpipev' needs at least 4",
            "parallel.micro_batch = 5,",
        ),
        (
            {"pp": 3, "schedule": "interleaved_1f1b", "micro_batch": 1},
            r"16 do not divide into 5 equal rounds",
            "parallel.micro_batch = 2,",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_pipeline_that_cannot_run_is_refused(parallel: dict[str, Any], says: str, way_out: str) -> None:
    with pytest.raises(JobError, match=says) as error:
        pipelined(**parallel)
    assert way_out in error.value.hint


@pytest.mark.parametrize("key", ["virtual_stages", "stage_cuts"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_stages_without_a_pipeline_are_refused(key: str, schedule: str) -> None:
    value = {"virtual_stages": 2, "stage_cuts": [2]}[key]
    with pytest.raises(JobError, match=rf"{key} = \[?2\]? .*parallel\.pp = 1"):
        pipelined(pp=1, schedule=schedule, **{key: value})


def test_a_schedule_alone_waits_for_a_pipeline() -> None:
    assert pipelined(pp=1, schedule="zbv").pp == 1


def test_a_plan_says_where_a_pipeline_is_cut_and_the_jobs_cuts_win() -> None:
    assert pipelined().stage_cuts == (3,)
    assert pipelined(stage_cuts=[5]).stage_cuts == (5,)
    assert pipelined(stage_cuts=[6]).stage_cuts == (6,), "the last stage holds the head alone"
    assert len(pipelined(schedule="zbv").stage_cuts) == 3


@given(
    schedule=st.sampled_from(
        ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
    ),
    pp=st.integers(2, 4),
    ranks=st.integers(1, 3),
    batches=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    known=st.booleans(),
)
def test_a_micro_batch_that_the_job_leaves_open_is_one_that_the_schedule_can_run(
    schedule: Schedule, pp: int, ranks: int, batches: list[int], known: bool
) -> None:
    asked = job(
        train={"global_batch": batches[0], "batch_ramp": [[9, batches[-1]]]},
        parallel={"pp": pp, "schedule": schedule, "dp_replicate": ranks},
    )
    possible = [
        size
        for size in range(1, 41)
        if all(
            invalid_micro_batches_reason(
                schedule, pp, Plan(dp_replicate=ranks, micro_batch=size).gradient_accumulation_steps(batch)
            )
            is None
            for batch in batches
        )
    ]
    workload = compute_decoder_workload(DECODER, 32) if known else None
    try:
        plan = complete_plan(asked, build_layout(asked, LAPTOP), LAPTOP, workload, DECODER).plan
    except JobError:
        assert min(batches) < ranks or not possible
        return
    assert plan.micro_batch in possible
