"""A job's `[model]` section beside a model that is a Python object."""

from __future__ import annotations

from pathlib import Path

from wanma.api.run.model_override import override_model_name
from wanma.job.file.loading import to_job


def test_other_keys_of_the_section_stay_the_jobs() -> None:
    job = {"model": {"batch_norm_group": 8}}
    overrides = override_model_name(job, ["train.steps=3"], "package.module:Net")
    model = to_job(job, overrides).model
    assert (model.factory, model.batch_norm_group) == ("package.module:Net", 8)


def test_a_job_file_may_leave_the_model_out(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert (
        to_job(path, override_model_name(path, [], "package.module:Net")).model.factory
        == "package.module:Net"
    )


def test_a_model_that_the_job_names_is_kept() -> None:
    assert override_model_name({"model": {"preset": "gpt-10m"}}, [], "package.module:Net") == []
    assert override_model_name({}, ["model.preset=gpt-10m"], "package.module:Net") == ["model.preset=gpt-10m"]
