from collections import Counter
from dataclasses import replace

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.calibration import Calibration
from wanma.planner.job_planner import PlanResult
from wanma.planner.preparation import job_cluster, job_planning
from wanma.planner.preparation.job_planning import initial_layout, plan_notes, prepare_job
from wanma.planner.rules import capabilities

JOB = {"model": {"preset": "gpt-1m"}, "parallel": {"compile": True}, "cluster": {"device": "cpu"}}


def test_without_a_compiler_compile_is_off_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "find_cpp_compiler", lambda: None)
    job = to_job(JOB)
    plan = initial_layout(job).plan
    assert not plan.compile
    assert plan_notes(job, PlanResult(plan, None)) == [
        "parallel.compile is off: on a CPU it needs a C++ compiler, and none was found (apt-get install g++)"
    ]


def test_with_a_compiler_the_job_is_followed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_planning, "find_cpp_compiler", lambda: "/usr/bin/g++")
    job = to_job(JOB)
    plan = initial_layout(job).plan
    assert plan.compile
    assert plan_notes(job, PlanResult(plan, None)) == []


def test_fp8_without_torchao_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", "H100", 80 << 30, {"fp8": 1979e12})
    monkeypatch.setattr(
        job_cluster, "discover_node", lambda: Cluster((NodeGroup("box", 8, 64 << 30, (gpu,)),))
    )
    job = to_job({"model": {"preset": "gpt-1m"}, "train": {"fp8": True, "precision": "bf16"}})
    monkeypatch.setattr(job_planning, "find_spec", lambda _: None)
    with pytest.raises(WanmaError, match=r"train\.fp8 needs the package `torchao`") as refusal:
        initial_layout(job)
    assert refusal.value.exit_code == 2
    monkeypatch.setattr(job_planning, "find_spec", lambda _: object())
    assert initial_layout(job).plan.approximate == ("fp8",)


def test_a_newer_torch_than_any_tried_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanma.torch_internals.versions.version", lambda _: "2.16.0+cpu")
    job = to_job({**JOB, "parallel": {}})
    plan = initial_layout(job).plan
    assert plan_notes(job, PlanResult(plan, None)) == [
        "torch 2.16.0: newer than any tried here: 2.15; wanma doctor compares layouts with it"
    ]


# ------------------------------------------------------------------ parallel = "auto"

FEW = {"auto": True, "schedule": "1f1b", "recompute": "none", "cp": 1}
"""So that a search is a matter of milliseconds."""


def on_gpus(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """This machine is one node of these, as its drivers tell."""
    (node,) = parse_shorthand(said).nodes
    monkeypatch.setattr(job_cluster, "discover_node", lambda: Cluster((replace(node, count=1),)))


def test_auto_is_the_fastest_plan_before_any_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "8 H100")
    monkeypatch.setattr(job_planning, "prepare_job_data", lambda *_: Counter())
    job = to_job({"model": {"preset": "gpt-10m"}, "train": {"precision": "bf16"}, "parallel": FEW})
    start = initial_layout(job)
    best = start.plan_result.search_result.best
    assert start.plan == best.plan
    prepared = prepare_job(job, start)
    assert prepared.plan == start.plan
    forecast = prepared.to_json()["forecast"]
    assert forecast["step"]["seconds"] == best.seconds
    assert any("the fastest of" in note for note in plan_notes(job, prepared.plan_result))


def test_auto_on_a_processor_that_was_never_measured_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "8 cores EPYC 7742")
    monkeypatch.setattr(job_planning, "load_calibration", Calibration)
    start = initial_layout(to_job({"model": {"preset": "gpt-1m"}, "parallel": "auto"}))
    assert start.plan_result is None
    assert (start.plan.world_size, start.plan.threads_per_rank) == (1, 8)


def test_a_plan_that_wanma_does_not_run_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpus(monkeypatch, "8 H100")
    monkeypatch.setattr(job_planning, "prepare_job_data", lambda *_: Counter())
    monkeypatch.setattr(capabilities, "installed_torch_version", lambda: (2, 13))
    parallel = {"tp": 2, "compile": True, "recompute": "full"}
    job = to_job({"model": {"preset": "gpt-10m"}, "train": {"precision": "bf16"}, "parallel": parallel})
    with pytest.raises(JobError, match=r"torch 2\.13 cannot compile") as refusal:
        prepare_job(job, initial_layout(job))
    assert refusal.value.exit_code == 2
    assert "set parallel.recompute = 'selective'" in refusal.value.hint


def test_fp8_is_left_out_where_it_is_allowed_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, "8 H100")
    job = to_job(
        {
            "model": {"preset": "llama-3.2-1b"},
            "train": {"precision": "bf16"},
            "parallel": {**FEW, "allow": ["fp8"], "pp": 1, "tp": 1, "dp_shard": 8, "shard": "parameters"},
        }
    )
    with_it = initial_layout(job)
    assert with_it.plan.fp8
    monkeypatch.setattr(job_planning, "find_spec", lambda _: None)
    without = initial_layout(job)
    assert without.plan_result is not None
    assert not without.plan.fp8
    assert plan_notes(job, without.plan_result)[0].startswith(
        "fp8 was not searched: it needs the package `torchao`"
    )


def test_bf16_that_is_allowed_for_another_model_than_a_decoder_is_told_to_be_left_out() -> None:
    given = {"train": {"precision": "fp32"}, "parallel": {"auto": True, "allow": ["bf16"]}}
    images = to_job({"model": {"family": "resnet"}, "data": {"images": "cifar"}, **given})
    decoder = to_job({"model": {"preset": "gpt-1m"}, **given})
    plan = PlanResult(Plan(), None)
    assert plan_notes(decoder, plan) == []
    assert plan_notes(images, plan) == [
        "bf16 was not searched: only decoders are planned in another precision"
    ]
