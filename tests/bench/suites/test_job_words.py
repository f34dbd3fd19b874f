"""Words of commands that name keys of the suite's job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.job.errors import WanmaError

SUITE = """\
[job.model]
factory = "net:Net"
arguments = {hidden = 64}

[job.train]
steps = 300
global_batch = 8

[job.parallel]
dp_replicate = 2

[job.cluster]
threads_per_rank = 3

[[contenders]]
name = "peer"
command = [
    "train", "--batch={train.global_batch}", "--ranks={ranks}", "--betas={train.betas}", "{job}", "{other}",
]
environment = {PRECISION = "{train.precision}"}
rank_variables = true

[rule]
steps = 20

[smoke]
steps = 2
settings = {"model.arguments.hidden" = 16}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.toml"
    path.write_text(SUITE)
    return path


def test_a_command_gets_what_the_job_says(file: Path) -> None:
    suite, _ = read_suite_or_job(file)
    (peer,) = suite.contenders
    assert peer.command[1:4] == ("--batch=8", "--ranks=2", "--betas=[0.9,0.95]")
    assert json.loads(peer.command[4]) == {
        "model": {"factory": "net:Net", "arguments": {"hidden": 64}},
        "train": {"steps": 20, "global_batch": 8},
        "parallel": {"dp_replicate": 2},
        "cluster": {"threads_per_rank": 3},
    }
    assert peer.command[5] == "{other}"
    assert peer.environment["PRECISION"] == "fp32"
    assert peer.environment["OMP_NUM_THREADS"] == "3", "as the ranks of wanma have"


def test_overrides_change_commands_like_jobs(file: Path) -> None:
    suite, _ = read_suite_or_job(
        file, overrides=["train.precision=bf16"], over=["train.global_batch=8,16"], steps=7
    )
    assert [one.name for one in suite.contenders] == ["peer global_batch=8", "peer global_batch=16"]
    assert [one.command[1] for one in suite.contenders] == ["--batch=8", "--batch=16"]
    assert {one.environment["PRECISION"] for one in suite.contenders} == {"bf16"}
    assert json.loads(suite.contenders[1].command[4])["train"]["steps"] == 7
    (small,) = read_suite_or_job(file, is_smoke=True)[0].contenders
    job = json.loads(small.command[4])
    assert (job["model"]["arguments"], job["train"]["steps"]) == ({"hidden": 16}, 2)


def test_a_key_that_the_job_does_not_set_is_refused(file: Path) -> None:
    file.write_text(file.read_text().replace("{train.precision}", "{cluster.rendezvous}"))
    with pytest.raises(WanmaError, match=r"\{cluster\.rendezvous\}, which the job"):
        read_suite_or_job(file)


def test_variables_of_ranks_need_a_job(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[[contenders]]\nname = "one"\ncommand = ["true", "{train.steps}"]\n')
    assert read_suite_or_job(path)[0].contenders[0].command == ("true", "{train.steps}")
    path.write_text(path.read_text() + "rank_variables = true\n")
    with pytest.raises(WanmaError, match="variables of ranks"):
        read_suite_or_job(path)
