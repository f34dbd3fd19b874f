"""`wanma data prepare` and `wanma data mix`: token files before a run, and the mixture that it has seen."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from support.data_command import DataCommand
from wanma.data.sampling.mixture import Mixture
from wanma.data.sampling.mixture_schedule import MixtureSchedule
from wanma.data.text.token_file import open_token_file
from wanma.job.file.loading import load_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory

JOB = """\
[model]
preset = "gpt-1m"
[data]
sources = [{name = "x", text = ["x"], weight = 3}, {name = "y", text = ["y"]}]
sequence_length = 8
cache = "cache"
[train]
steps = 100
global_batch = 10
batch_ramp = [[0, 2], [5, 10]]
"""


@pytest.fixture
def job(data: DataCommand) -> DataCommand:
    for source in "xy":
        (data.folder / source).mkdir()
        for number in range(20):
            (data.folder / source / f"{number}.txt").write_text(
                f"{source} {number} ten thousand horses\n" * 5
            )
    (data.folder / "job.toml").write_text(JOB)
    return data


def test_prepare_builds_what_a_run_needs(job: DataCommand) -> None:
    ran = job("prepare", "job.toml")
    ran.check()
    assert ran.out.startswith("ready in ")
    assert ran.out.rstrip().endswith("cache: cache")
    folders = [path for path in (job.folder / "cache" / "tokens").iterdir() if path.is_dir()]
    assert sorted(open_token_file(folder).header["documents"] for folder in folders) == [20, 20]
    assert job("prepare", "job.toml", "data.cache=cache").code == 0


def test_prepare_names_what_is_missing(job: DataCommand) -> None:
    ran = job("prepare", "job.toml", "data.tokenizer=missing.json")
    assert ran.code == 2
    assert "data.tokenizer: 'missing.json': no such file" in ran.told_once()


def test_prepare_has_nothing_to_do_for_a_program(job: DataCommand) -> None:
    (job.folder / "own.toml").write_text('[model]\npreset = "gpt-1m"\n[data]\nfactory = "faulty:data"\n')
    ran = job("prepare", "own.toml")
    assert ran.code == 0
    assert "nothing to prepare" in ran.out


def start_run(job: DataCommand, steps: int) -> None:
    """Leave the records of a run of some steps."""
    run = RunDirectory(job.folder / "runs" / "gpt")
    run.create()
    run.job.write_text(job_to_toml(load_job(job.folder / "job.toml")))
    run.metrics.write_text(
        "".join(json.dumps({"step": step, "time": 1.0}) + "\n" for step in range(1, steps + 1))
    )
    run.events.write_text("")


def test_mix_counts_the_samples_of_each_source(job: DataCommand) -> None:
    start_run(job, 8)
    found = job.json("mix", "gpt")
    samples = 5 * 2 + 3 * 10  # by the ramp
    assert (found["step"], found["samples"]) == (8, samples)
    sources, _ = Mixture.from_weights([3, 1]).locate_samples(np.arange(samples))
    expected = Counter(sources.tolist())
    assert [(one["name"], one["samples"], one["tokens"]) for one in found["sources"]] == [
        ("x", expected[0], 8 * expected[0]),
        ("y", expected[1], 8 * expected[1]),
    ]
    assert expected[0] == 30
    assert "x" in job("mix", "gpt").out
    assert "75.0 %" in job("mix").out, "without a name the newest run"


def test_mix_counts_epochs_of_the_opened_data(job: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.folder)
    start_run(job, 100)
    found = job.json("mix", "gpt", "--epochs")
    from wanma.data.opening import open_dataset

    loaded = load_job(job.folder / "job.toml")
    described = open_dataset(loaded.data, loaded.train).describe()["sources"]
    assert found["epochs"] == {one["name"]: pytest.approx(one["epochs"], rel=0.01) for one in described}, (
        "after all steps as forecast"
    )


def test_mix_of_a_run_without_steps_is_one_message(job: DataCommand) -> None:
    start_run(job, 0)
    ran = job("mix", "gpt")
    assert ran.code == 2
    assert "the run gpt has done no step yet" in ran.told_once()
    ran = job("mix", "gpd")
    assert "Did you mean 'gpt'?" in ran.told_once()


def test_mix_counts_a_curriculum_by_the_samples_consumed(job: DataCommand) -> None:
    text = (job.folder / "job.toml").read_text()
    (job.folder / "job.toml").write_text(text.replace("weight = 3", "weight = [[0, 1], [20, 0]]"))
    start_run(job, 8)
    found = job.json("mix", "gpt")
    weights = [[(0, 1.0), (20, 0.0)], 1.0]
    sources, _ = MixtureSchedule.from_weights(weights).locate_samples(np.arange(40))
    expected = Counter(sources.tolist())
    assert expected == {0: 10, 1: 30}
    assert [one["samples"] for one in found["sources"]] == [10, 30]
    assert [one["weight_share"] for one in found["sources"]] == [0, 1]


def test_mix_counts_epochs_of_parts_that_other_nodes_have(
    job: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.folder)
    lines = (job.folder / "job.toml").read_text().splitlines()
    parts = ['text = ["x", "elsewhere"]', 'placement = "parts"', 'part_order = "interleaved"']
    changed = [line for one in lines for line in (parts if one.startswith("sources") else [one])]
    (job.folder / "job.toml").write_text("\n".join(changed))
    start_run(job, 8)
    record = RunDirectory(job.folder / "runs" / "gpt").data_parts
    record.write_text(json.dumps([{"train_samples": 30}, {"train_samples": 50}]))
    assert job.json("mix", "gpt", "--epochs")["epochs"] == {"text": 40 / 80}
    record.unlink()
    assert "data-parts.json cannot be read" in job("mix", "gpt", "--epochs").told_once()


def test_mix_counts_sources_of_images(job: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.folder)
    for source, count in (("x", 12), ("y", 8)):
        for number in range(count):
            job.write_image(f"images/{source}/{'cat' if number % 2 else 'dog'}/{number}.png", (number, 0, 0))
    text = (job.folder / "job.toml").read_text()
    text = text.replace('text = ["x"]', 'images = ["images/x"]').replace(
        'text = ["y"]', 'images = ["images/y"]'
    )
    (job.folder / "job.toml").write_text(text.replace('"gpt-1m"', '"cifar-convnet"'))
    assert job("prepare", "job.toml").code == 0
    start_run(job, 8)
    found = job.json("mix", "gpt", "--epochs")
    assert [(one["samples"], one["tokens"]) for one in found["sources"]] == [(30, None), (10, None)]
    assert found["epochs"] == {"x": pytest.approx(30 / 11), "y": pytest.approx(10 / 7)}, (
        "one of each is held out"
    )
