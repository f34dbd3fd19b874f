"""A job's `[model]` section beside a model that is a Python object."""

from __future__ import annotations

from pathlib import Path

from wanma.api.run.model_override import name_own_model
from wanma.job.file.loading import job_from


def test_other_keys_of_the_section_stay_the_jobs() -> None:
    job = {"model": {"batch_norm_group": 8}}
    overrides = name_own_model(job, ["train.steps=3"], "package.module:Net")
    model = job_from(job, overrides).model
    assert (model.factory, model.batch_norm_group) == ("package.module:Net", 8)


def test_a_job_file_may_leave_the_model_out(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert (
        job_from(path, name_own_model(path, [], "package.module:Net")).model.factory == "package.module:Net"
    )


def test_a_model_that_the_job_names_is_kept() -> None:
    assert name_own_model({"model": {"preset": "gpt-10m"}}, [], "package.module:Net") == []
    assert name_own_model({}, ["model.preset=gpt-10m"], "package.module:Net") == ["model.preset=gpt-10m"]
