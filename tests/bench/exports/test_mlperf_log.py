"""MLPerf training log: its lines keep the rules of ruleset 6.1.0.

The rules here are recorded from `mlperf_logging.compliance_checker` 4.1.68, `training_6.1.0/common.yaml` and
the closed rules of the three benchmarks; `test_mlperf_checker` has the checker itself read the logs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.mlperf_logs import LLAMA, PLAN, STARTED, measurement, validations
from wanma.bench.exports.mlperf_log import (
    SampleCounts,
    Submission,
    ValidationRecord,
    mlperf_log,
    read_validations,
)
from wanma.bench.measurements.measurement import Measurement, StepRecord, TurnsTaken
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job
from wanma.report.run_report import read_report

ONCE = [
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_benchmark",
    "submission_status",
    "init_stop",
    "run_start",
    "run_stop",
    "train_samples",
    "eval_samples",
    "gradient_accumulation_steps",
    "global_batch_size",
    "max_sequence_length",
    "opt_name",
    "opt_base_learning_rate",
    "opt_end_learning_rate",
    "opt_learning_rate_warmup_steps",
    "opt_learning_rate_decay_steps",
    "opt_learning_rate_decay_schedule",
    "opt_adamw_beta_1",
    "opt_adamw_beta_2",
    "opt_adamw_epsilon",
    "opt_adamw_weight_decay",
    "opt_gradient_clip_norm",
    "max_steps",
    "config_filename",
    "micro_batch_size",
    "tensor_parallelism",
    "pipeline_parallelism",
    "context_parallelism",
    "expert_parallelism",
    "lowest_numerical_precision_in_linear",
    "lowest_numerical_precision_in_attn",
    "lowest_numerical_precision_in_comm",
]
AT_LEAST_ONCE = [
    "cache_clear",
    "init_start",
    "block_start",
    "block_stop",
    "eval_start",
    "eval_stop",
    "eval_accuracy",
]
WITH_SAMPLES = ["block_start", "block_stop", "eval_start", "eval_stop", "eval_accuracy"]
CLOSED = Submission("an organisation", "a node", "llama31_8b", "closed")


def lines(*losses: float, submission: Submission | None = None, job: Any = LLAMA) -> list[dict[str, Any]]:
    text = mlperf_log(
        measurement(),
        validations(*losses),
        Job.model_validate(job),
        SampleCounts(1_000_000, 1024),
        submission or CLOSED,
        PLAN,
    )
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def value(log: list[dict[str, Any]], key: str) -> Any:
    (found,) = (line["value"] for line in log if line["key"] == key)
    return found


def test_every_key_stands_as_often_as_the_rules_demand() -> None:
    keys = [line["key"] for line in lines(4.0, 3.0)]
    assert {key: keys.count(key) for key in ONCE} == dict.fromkeys(ONCE, 1)
    assert [key for key in AT_LEAST_ONCE if key not in keys] == []


def test_a_line_has_the_fields_that_the_parser_reads() -> None:
    log = lines(3.0)
    assert {tuple(line) for line in log} == {
        ("namespace", "time_ms", "event_type", "key", "value", "metadata")
    }
    assert [
        line["key"] for line in log if line["key"] in WITH_SAMPLES and "samples_count" not in line["metadata"]
    ] == []
    times = [line["time_ms"] for line in log]
    assert times == sorted(times)


def test_the_run_begins_with_the_first_step_and_ends_with_the_validation_that_reaches_the_target() -> None:
    log = lines(4.0, 3.0, 2.0)
    at = {line["key"]: line for line in log}
    assert at["init_start"]["time_ms"] == 1000 * STARTED
    assert at["init_stop"]["time_ms"] == at["run_start"]["time_ms"] == 1000 * (STARTED + 10)
    assert at["run_stop"]["time_ms"] == 1000 * (STARTED + 14.5)
    assert at["run_stop"]["metadata"] == {"status": "success", "samples_count": 128}
    assert [line["value"] for line in log if line["key"] == "eval_accuracy"] == [4.0, 3.0]
    keys = [line["key"] for line in log]
    assert keys.index("init_stop") < keys.index("run_start") < keys.index("block_start")


def test_a_run_that_misses_the_target_is_aborted() -> None:
    stop = lines(4.0, 3.9)[-1]
    assert (stop["key"], stop["metadata"]["status"]) == ("run_stop", "aborted")


def test_samples_count_from_the_start_of_the_run() -> None:
    counts = [
        line["metadata"]["samples_count"]
        for line in lines(4.0, 3.0)
        if line["key"] in ("block_start", "eval_accuracy")
    ]
    assert counts == [0, 64, 64, 128]


def test_samples_of_steps_that_were_not_recorded_count_and_repeated_ones_count_once() -> None:
    def counts(*steps: StepRecord) -> list[int]:
        one = Measurement("llama", 0, STARTED, 100.0, 0, steps)
        text = mlperf_log(
            one, validations(4.0, 3.9), Job.model_validate(LLAMA), SampleCounts(9, 9), CLOSED, PLAN
        )
        log = [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]
        return [line["metadata"]["samples_count"] for line in log if line["key"] == "eval_accuracy"]

    batch = Job.model_validate(LLAMA).train.global_batch
    assert counts(StepRecord(1, STARTED + 11, 1.0)) == [2 * batch, 4 * batch]
    repeated = [StepRecord(step, STARTED + 11, 1.0, samples=5.0) for step in (1, 2, 3, 2, 3, 4)]
    assert counts(*repeated) == [10, 20]


def test_settings_are_those_of_the_job_and_the_plan() -> None:
    log = lines(3.0)
    expected = {
        "opt_learning_rate_decay_steps": 1_200_000 - 100,
        "opt_learning_rate_decay_schedule": "cosine with linear warmup",
        "opt_adamw_epsilon": 1e-5,
        "opt_end_learning_rate": pytest.approx(1e-4),
        "max_sequence_length": 8192,
        "eval_samples": 1024,
        "gradient_accumulation_steps": 2,
        "micro_batch_size": 4,
        "tensor_parallelism": 2,
        "lowest_numerical_precision_in_linear": "fp8",
        "lowest_numerical_precision_in_attn": "bfloat16",
        "lowest_numerical_precision_in_comm": "int8",
        "cache_clear": False,
    }
    assert {key: value(log, key) for key in expected} == expected


def test_validations_come_from_the_events_and_phases_of_a_run() -> None:
    run = RunDirectory(Path(__file__).parents[2] / "support" / "older_run")
    assert read_validations(read_report(run)) == [
        ValidationRecord(4, 1795640980.095138, 0.0023765470000398636, 5.706548690795898)
    ]


def test_a_validation_after_the_first_step_is_no_part_of_it() -> None:
    first = StepRecord(1, STARTED + 13, 1.0, samples=32.0, phases={"validation": 2.0})
    one = Measurement("llama", 0, STARTED, 20.0, 0, (first,))
    text = mlperf_log(
        one,
        [ValidationRecord(1, STARTED + 13, 2.0, 3.0)],
        Job.model_validate(LLAMA),
        SampleCounts(10, 10),
        Submission("o", "p", "llama31_8b", "closed"),
        PLAN,
    )
    starts = [json.loads(line.split(" ", 1)[1]) for line in text.splitlines() if '"run_start"' in line]
    assert [line["time_ms"] for line in starts] == [1000 * (STARTED + 10)]


def test_lora_is_logged_for_its_benchmark() -> None:
    job = {"model": {"family": "decoder", "lora_rank": 16, "lora_alpha": 32.0}}
    log = lines(0.9, job=job, submission=Submission("an organisation", "a node", "llama2_70b_lora"))
    assert (value(log, "lora_rank"), value(log, "lora_alpha")) == (16, 32.0)
    assert log[-1]["metadata"]["status"] == "success"


@pytest.mark.parametrize(
    ("submission", "losses", "steps", "message"),
    [
        (Submission("o", "p", "resnet"), (1.0,), 4, "'resnet' is no benchmark of MLPerf training 6.1.0"),
        (Submission("o", "p", "llama31_8b"), (), 4, "has no validation"),
        (Submission("o", "p", "llama31_8b"), (1.0,), 0, "has no steps"),
        (Submission("o", "p", "llama31_8b"), (3.2, 1.0), 4, "loss below 1, a placeholder .* here is 1"),
    ],
)
def test_a_log_that_would_break_the_rules_is_refused(
    submission: Submission, losses: tuple[float, ...], steps: int, message: str
) -> None:
    with pytest.raises(WanmaError, match=message):
        mlperf_log(
            measurement(steps),
            validations(*losses),
            Job.model_validate(LLAMA),
            SampleCounts(10, 10),
            submission,
            PLAN,
        )


def test_a_measurement_in_turns_has_no_log() -> None:
    turns = TurnsTaken(1.0, ((1.0, 2.0),), 1, 4)
    with pytest.raises(WanmaError, match="was measured in turns"):
        mlperf_log(
            replace(measurement(), turns=turns),
            validations(0.9),
            Job.model_validate(LLAMA),
            SampleCounts(10, 10),
            CLOSED,
            PLAN,
        )
