"""KEY=VALUE on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.job.errors import JobError
from wanma.job.file.loading import Override, load_job, parse_override


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=500", ("train", "steps"), 500),
        ("train.steps=1_000", ("train", "steps"), 1000),
        ("train.learning_rate=3e-4", ("train", "learning_rate"), 3e-4),
        ("train.precision=bf16", ("train", "precision"), "bf16"),
        ('train.precision="bf16"', ("train", "precision"), "bf16"),
        ("train.deterministic=true", ("train", "deterministic"), True),
        ('data.text=["a","b c"]', ("data", "text"), ["a", "b c"]),
        ("data.text=[a, b]", ("data", "text"), ["a", "b"]),
        ("data.text=[]", ("data", "text"), []),
        ("train.betas=[0.9, 0.99]", ("train", "betas"), [0.9, 0.99]),
        ("train.batch_ramp=[[0,4],[9,8]]", ("train", "batch_ramp"), [[0, 4], [9, 8]]),
        ("model.arguments={width=3}", ("model", "arguments"), {"width": 3}),
        ("parallel=auto", ("parallel",), "auto"),
        ("cluster.rendezvous=10.0.0.1:29500", ("cluster", "rendezvous"), "10.0.0.1:29500"),
        ("observe.name=12", ("observe", "name"), "12"),
        ("observe.name=2026-01-01", ("observe", "name"), "2026-01-01"),
        ("data.tokenizer=a=b", ("data", "tokenizer"), "a=b"),
        (" train.steps = 5 ", ("train", "steps"), 5),
        ("data.sources.0.weight=2", ("data", "sources", "0", "weight"), 2),
    ],
)
def test_a_value_is_a_toml_literal_or_else_text(text: str, path: tuple[str, ...], value: object) -> None:
    assert parse_override(text) == Override(path, value)


def test_a_value_cannot_smuggle_in_another_line_of_toml() -> None:
    assert parse_override("data.tokenizer=1\nx=2").value == "1\nx=2"


@pytest.mark.parametrize("text", ["train.steps", "train.steps 500", "=5", ".steps=5", "train..steps=5", ""])
def test_what_is_no_override_is_told_what_one_looks_like(text: str) -> None:
    with pytest.raises(JobError, match=r"KEY=VALUE, e\.g\. train\.steps=500"):
        parse_override(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('model.preset = "a"\n[train]\nsteps = 3\n[[data.sources]]\nname = "s"\ntext = ["x"]\n')
    return path


def test_later_overrides_win_over_earlier_ones_and_over_the_file(file: Path) -> None:
    assert load_job(file, ["train.steps=4", "train.steps=5"]).train.steps == 5


def test_an_empty_override_returns_a_key_to_its_default(file: Path) -> None:
    job = load_job(file, ["model.preset=", "model.factory=package.module:build", "train.steps="])
    assert (job.model.preset, job.model.factory, job.train.steps) == (None, "package.module:build", 300)


def test_an_element_of_a_list_is_reached_by_its_number(file: Path) -> None:
    assert load_job(file, ["data.sources.0.weight=2"]).data.sources[0].weight == 2.0


@pytest.mark.parametrize(
    ("overrides", "fact"),
    [
        (["data.sources.1.weight=2"], "override 1 .* no data.sources.1.weight"),
        (["train.seed=2", "train.steps.x=2"], "override 2 .* no train.steps.x"),
        (["train.seed.x=2"], "override 1 .*train.seed = { x = 2 }"),
    ],
)
def test_an_override_of_no_key_is_told_by_its_number(file: Path, overrides: list[str], fact: str) -> None:
    with pytest.raises(JobError, match=fact):
        load_job(file, overrides)


def test_auto_replaces_whatever_else_parallel_was(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('parallel = 3\nmodel.preset = "a"\n')
    assert load_job(path, ["parallel=auto"]).parallel.auto


def test_a_clash_with_the_file_is_told_how_to_unset_the_key(file: Path) -> None:
    with pytest.raises(JobError, match="given: preset, family") as caught:
        load_job(file, ["model.family=decoder"])
    assert "`model.preset=`" in caught.value.hint


def test_an_empty_override_unsets_a_key_of_a_table_in_a_section(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('model.preset = "a"\ndata.path = "x"\ndata.columns.messages = "chat"\n')
    assert load_job(path, ["data.columns.messages="]).data.columns.messages is None
