"""`wanma data prepare`: token files and indexes before a run, by one process or several."""

from __future__ import annotations

import pytest

from support.data_command import DataCommand
from wanma.data.text.token_file import open_token_file
from wanma.observe.console import dataset_progress
from wanma.observe.units import bytes_text

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
    ran = job("prepare", "job.toml").check()
    assert ran.out.startswith("ready in ")
    assert ran.out.rstrip().endswith("cache: cache")
    folders = [path for path in (job.folder / "cache" / "tokens").iterdir() if path.is_dir()]
    assert sorted(open_token_file(folder).header["documents"] for folder in folders) == [20, 20]
    assert job("prepare", "job.toml", "data.cache=cache").code == 0


def test_prepare_names_what_is_missing(job: DataCommand) -> None:
    ran = job("prepare", "job.toml", "data.tokenizer=missing.json")
    assert ran.code == 2
    assert "data.tokenizer: 'missing.json'" in ran.told_once()


def test_prepare_has_nothing_to_do_for_a_program(job: DataCommand) -> None:
    (job.folder / "own.toml").write_text('[model]\npreset = "gpt-1m"\n[data]\nfactory = "faulty:data"\n')
    ran = job("prepare", "own.toml")
    assert ran.code == 0
    assert "nothing to prepare" in ran.out


TABLE_JOB = """\
[model]
factory = "torch.nn:Linear"
arguments = { in_features = 1, out_features = 2 }
[data]
path = "rows.csv"
columns = { features = ["x"], target = "species" }
"""
RATINGS_JOB = """\
[model]
family = "recommender"
kind = "matrix_factorization"
[data]
path = "rows.csv"
interactions = { split = "random" }
"""


@pytest.mark.parametrize(
    ("job_text", "rows"),
    [
        (TABLE_JOB, "x,species\n" + "1.5,ant\n0.5,owl\n" * 50),
        (RATINGS_JOB, "user,item,rating,time\n" + "3,7,4.5,10\n0,2,1,9\n" * 50),
    ],
    ids=["table", "interactions"],
)
def test_prepare_shows_progress_of_an_index_and_of_the_reading_after_it(
    job_text: str, rows: str, data: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_progress, "LINE_INTERVAL_SECONDS", 0.0)  # a line for each call
    (data.folder / "rows.csv").write_text(rows)
    (data.folder / "job.toml").write_text(job_text)
    ran = data("prepare", "job.toml").check()
    size = bytes_text(len(rows))
    assert ran.err.count(f"preparing: {size} of {size}\n") == 2
