"""A job written as TOML is the same job when read, and equal jobs have equal hashes."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from wanma.job.errors import JobError
from wanma.job.file.loading import load_job, to_job
from wanma.job.file.serialization import job_differences, job_hash, job_to_toml, toml_value
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection

sys.path.insert(0, str(Path(__file__).parent))  # a helper beside the tests, which are no package
from job_strategy import jobs, plain

GPT = Job(model=ModelSection(preset="gpt-10m"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_any_job_survives_the_way_through_toml(job: Job) -> None:
    assert to_job(tomllib.loads(job_to_toml(job))) == job


@given(plain)
def test_any_value_survives_as_a_toml_literal(value: object) -> None:
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_defaults_are_written_out_so_that_a_run_says_all_it_ran_with(tmp_path: Path) -> None:
    written = tomllib.loads(job_to_toml(GPT))
    assert written["train"]["betas"] == [0.9, 0.95]
    assert written["parallel"]["dp_replicate"] == 1
    path = tmp_path / "job.toml"
    path.write_text(job_to_toml(GPT))
    assert load_job(path, ["observe.name="]).train == GPT.train


def test_what_auto_leaves_open_is_not_written_so_that_it_stays_open(tmp_path: Path) -> None:
    job = to_job({"model": {"preset": "gpt-1m"}, "parallel": {"auto": True, "tp": 2}})
    assert tomllib.loads(job_to_toml(job))["parallel"] == {"auto": True, "tp": 2}
    path = tmp_path / "job.toml"
    path.write_text(job_to_toml(job))
    again = load_job(path)
    assert again.parallel == job.parallel
    assert again.parallel.model_fields_set == {"auto", "tp"}


def test_tables_are_written_under_their_headers() -> None:
    job = to_job({"model": {"preset": "a"}, "data": {"sources": [{"name": "s", "text": ["t"]}]}})
    assert (
        '\n[[data.sources]]\nname = "s"\npath = []\ntext = ["t"]\nimages = []\nclass_names = []\n'
        "arguments = {}\nweight = 1.0\n" in job_to_toml(job)
    )
    assert "\nsources = []\n" in job_to_toml(GPT)


def test_every_key_that_may_be_unset_is_unset_by_default() -> None:
    """Else leaving it out of the file would not bring None back."""
    for section in Job.model_fields:
        values = getattr(GPT, section)
        for name, field in type(values).model_fields.items():
            if "None" in str(field.annotation) and (section, name) != ("model", "preset"):
                assert getattr(values, name) is None, f"{section}.{name}"


@pytest.mark.parametrize("value", [None, object(), {1: 2}, "\ud800"])
def test_a_value_without_a_toml_form_is_refused_by_name(value: object) -> None:
    job = Job(model=ModelSection(factory="a:b", arguments={"x": value}))
    with pytest.raises(JobError, match=r"model\.arguments\.x"):
        job_to_toml(job)


def test_the_hash_of_a_job_is_the_same_in_every_process() -> None:
    assert job_hash(GPT) == job_hash(to_job(tomllib.loads(job_to_toml(GPT))))
    assert len(job_hash(GPT)) == 16
    assert job_hash(GPT) != job_hash(to_job(GPT, ["observe.console=quiet"]))


def test_differences_names_each_changed_key_with_both_values() -> None:
    assert job_differences(GPT, to_job(tomllib.loads(job_to_toml(GPT)))) == []
    assert job_differences(GPT, to_job(GPT, ["train.steps=2", "parallel.tp=2"])) == [
        ("train.steps", 300, 2),
        ("parallel.tp", 1, 2),
    ]
