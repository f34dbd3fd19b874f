"""Keys that change nothing in a run are told, with the reason; defaults are not."""

from __future__ import annotations

import pytest

from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.rules.unused_keys import unused_key_notes

ALONE = Plan()


def told(*overrides: str, plan: Plan = ALONE) -> list[str]:
    job = to_job({"model": {"preset": "gpt-1m"}, "train": {"steps": 20}}, overrides)
    return unused_key_notes(job, plan)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("parallel.schedule=zbv", "there is no pipeline"),
        ("parallel.stage_cuts=[2]", "there is no pipeline"),
        ("parallel.compression=topk", "one data rank"),
        ("parallel.overlap=false", "one data rank"),
        ("parallel.sequence_parallel=false", "parallel.tp = 1"),
        ("parallel.cp_method=all_to_all", "parallel.cp = 1"),
        ("parallel.collectives=gloo", "there is one rank"),
        ("parallel.bucket_bytes=1000", "one replica"),
        ("parallel.recompute_share=0.5", "nothing is recomputed"),
        ("train.momentum=0.5", "optimizer = 'adamw' has no momentum"),
        ("train.loss_scale=2", "only fp16 uses a loss scale"),
        ("train.spike_deviations=4", "spikes are ignored"),
        ("checkpoint.upload_keep=2", "nothing is uploaded"),
        ("checkpoint.partner=true", "no partner node"),
        ("cluster.rendezvous=host:29500", "one node"),
        ("cluster.last_call_timeout_seconds=3", "waits for all nodes"),
        ("cluster.scratch=here", "nothing is offloaded to disk"),
        ("model.lora_alpha=8", "no adapters"),
        ("data.block_samples=8", "data.shuffle = 'full'"),
        ("data.window_blocks=8", "data.shuffle = 'full'"),
        ("data.arguments={a=1}", "data.factory is not set"),
        ("data.part_order=interleaved", "data.placement = 'shared'"),
        ("data.chat.packing=false", "no conversations"),
        ("data.image_transform.size=24", "no stored images"),
        ("data.interactions.split=leave_last", "no interactions"),
        ("train.optimizer_arguments={a=1}", "no train.optimizer_factory"),
        ("observe.metrics_token=env:TOKEN", "observe.metrics_port is not set"),
        ("observe.alert_body=x", "observe.alert_webhook is not set"),
    ],
)
def test_an_idle_key_is_told_with_the_reason(override: str, says: str) -> None:
    (line,) = told(override)
    assert line.startswith(override.split("=")[0])
    assert says in line


@pytest.mark.parametrize(
    ("chosen", "override"),
    [
        ("data.path=synthetic:20x30x400", "data.validation_fraction=0.2"),
        ("data.path=synthetic:20x30x400", "data.interactions.top_k=5"),
        ("data.path=synthetic:20x30x400", "data.interactions.negative_power=1"),
        ("train.optimizer_factory=torch.optim:RAdam", "train.betas=[0.9, 0.99]"),
        ("train.schedule_factory=package:schedule", "train.warmup_steps=5"),
        ("observe.alerts=false", "observe.alert_command=['mail']"),
        ("servers.count=2", "checkpoint.full_every=3"),
    ],
)
def test_a_key_that_another_one_disables_is_told(chosen: str, override: str) -> None:
    (line,) = told(chosen, override)
    assert line.startswith(override.split("=")[0])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.warmup_steps=20", "warmup_steps = 20 is not reached"),
        ("train.validate_every_steps=21", "validation runs only at the end"),
        ("checkpoint.every_steps=21", "a checkpoint is saved only at the end"),
        ("train.batch_ramp=[[20, 64]]", "step 20 is not reached"),
        ("parallel.compression_from_step=20", "compression_from_step = 20 is not reached"),
        (
            "data.sources=[{name='a', text=['b'], weight=[[0, 1], [639, 2], [640, 3]]}]",
            "data.sources[0].weight: sample 640 is not reached: the run has 640 samples",
        ),
    ],
)
def test_what_begins_after_the_last_step_is_told(override: str, says: str) -> None:
    assert any(says in line for line in told(override))


def test_a_job_that_spells_out_its_defaults_is_told_nothing() -> None:
    job = Job.model_validate(to_job({"model": {"preset": "gpt-1m"}}).model_dump())
    assert unused_key_notes(job, ALONE) == []


def test_keys_that_have_an_effect_are_not_told() -> None:
    overrides = (
        "parallel.pp=2",
        "parallel.schedule=zbv",
        "parallel.dp_replicate=2",
        "parallel.compression=int8",
    )
    assert told(*overrides, plan=Plan(pp=2, dp_replicate=2, schedule="zbv", virtual_stages=2)) == []
