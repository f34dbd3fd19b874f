"""Every key of a job has one rule for a resume, and settings are compared by it."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from wanma.job.file.loading import to_job
from wanma.job.file.run_settings import (
    SETTING_RULES,
    SettingDifference,
    merge_settings,
    rule_of,
    run_settings,
    setting_differences,
)
from wanma.job.sections.job import Job

JOB = to_job({"model": {"preset": "gpt-1m"}})
KEYS = [(section, key) for section in Job.model_fields for key in type(getattr(JOB, section)).model_fields]


def test_every_key_has_a_rule_and_every_name_in_the_table_is_a_key() -> None:
    for section, key in KEYS:
        assert rule_of(section, key) in SETTING_RULES
    named = Counter(
        (section, name)
        for sections in SETTING_RULES.values()
        for section, names in sections.items()
        for name in names
    )
    assert {pair for pair in named if pair[1] != "*"} <= set(KEYS)
    assert set(named.values()) == {1}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("train.seed", "identity"),
        ("data.validation_fraction", "identity"),
        ("train.schedule", "remaining"),
        ("model.heads", "content"),
        ("train.global_batch", "position"),
        ("train.validate_every_steps", "free"),
        ("parallel.dp_shard", "free"),
        ("parallel.compression", "remaining"),
        ("checkpoint.every_steps", "free"),
    ],
)
def test_the_rule_of_a_key(key: str, rule: str) -> None:
    assert rule_of(*key.split(".")) == rule


def test_settings_are_compared_where_both_are_known() -> None:
    saved = run_settings(JOB, {"heads": 4, "limit": math.inf, "new": 1})
    assert saved["model.limit"] == "Infinity", "a manifest has no infinity"
    current = run_settings(to_job(JOB, ["train.seed=2", "train.validate_every_steps=9"]), {"heads": 8})
    assert set(setting_differences(saved, current)) == {
        SettingDifference("model.heads", 4, 8),
        SettingDifference("train.seed", 1, 2),
    }
    (of_model,) = setting_differences(saved, current, is_model_only=True)
    assert (of_model.key, of_model.rule) == ("model.heads", "identity")
    assert list(setting_differences({}, current)) == []


def test_a_run_that_goes_on_may_leave_out_the_folder_from_which_it_started() -> None:
    started, onward, elsewhere = (
        run_settings(to_job(JOB, [f"checkpoint.start_from={folder}"]), {}) for folder in ("a", "", "b")
    )
    assert list(setting_differences(started, onward)) == []
    assert merge_settings(started, onward) == started
    for saved in (started, onward):
        (difference,) = setting_differences(saved, elsewhere)
        assert difference.key == "checkpoint.start_from"
