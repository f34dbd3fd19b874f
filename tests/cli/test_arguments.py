"""RUN, JOB and the options that are keys in another form."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from wanma.cli.arguments import resolve_run
from wanma.cli.commands.train import _option_overrides
from wanma.cli.parser import build_parser, parse
from wanma.job.errors import WanmaError


def chosen(folder: Path, name: str | None) -> str:
    return resolve_run(argparse.Namespace(runs=folder, run_name=name)).name


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for time, name in enumerate(("older", "newer"), 1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").touch()
        os.utime(tmp_path / name / "job.toml", (time, time))
    return tmp_path


def test_a_run_is_found_by_name_by_folder_or_as_the_newest(runs: Path) -> None:
    assert chosen(runs, "older") == "older"
    assert chosen(Path("nowhere"), str(runs / "older")) == "older"
    assert chosen(runs, None) == "newer"


def test_an_unknown_run_is_told_with_the_runs_that_are_there(runs: Path) -> None:
    with pytest.raises(WanmaError, match=r"'oldr'\. Did you mean 'older'") as caught:
        chosen(runs, "oldr")
    assert caught.value.hint == f"runs in {runs}: newer, older"
    with pytest.raises(WanmaError, match="there are no runs in"):
        chosen(runs / "empty", None)


def test_overrides_may_stand_before_and_after_options() -> None:
    parsed = parse(build_parser(), ["train", "a.toml", "train.steps=1", "--dry-run", "train.seed=2", "a=3"])
    assert parsed.overrides == ["train.steps=1", "train.seed=2", "a=3"]
    assert (parsed.job, parsed.dry_run) == (Path("a.toml"), True)
    assert parsed.command_line[:3] == ["wanma", "train", "a.toml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rounds", "0"), "--rounds: '0' is not a number"),
        (("--steps", "-3"), "--steps: '-3' is not a number"),
        (("--precision", "2"), "--precision: '2' is not between 0 and 1"),
        (("--precision", "few"), "--precision: 'few' is not a number"),
        (("--foreign-limit", "-1"), "--foreign-limit: '-1' is less than 0"),
        (("--foreign-limit", "nan"), "--foreign-limit: 'nan' is not a number"),
    ],
    ids=str,
)
def test_numbers_of_a_benchmark_that_make_no_sense_are_refused(
    options: tuple[str, str], message: str
) -> None:
    with pytest.raises(WanmaError) as refused:
        parse(build_parser(), ["bench", "train", "gpt", *options])
    assert message in refused.value.message


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(WanmaError) as refused:
        parse(build_parser(), ["observe", "render", "m", "--targets-url", "localhost:8265/targets"])
    assert "--targets-url: 'localhost:8265/targets'" in refused.value.message


@pytest.mark.parametrize(("text", "count"), [("8", 8), ("100_000", 100_000), ("1,024", 1024)])
def test_counts_may_have_separators(text: str, count: int) -> None:
    assert parse(build_parser(), ["bench", "scale", "gpt", "--to", text]).to == count


@pytest.mark.parametrize("option", ["--local-rank=1", "--local_rank=1"])
def test_the_local_rank_that_launchers_put_before_the_command_is_left_to_their_variables(option: str) -> None:
    assert parse(build_parser(), [option, "train", "a.toml"]).job == Path("a.toml")
    launched = parse(build_parser(), [option, "launch", "--local-rank", "a.py"])
    assert launched.local_rank_option == "--local-rank", "that of the script"


def test_options_for_several_machines_are_keys_of_the_job() -> None:
    line = ["train", "a.toml", "--nodes", "2", "--rendezvous", "h:1", "--node-rank", "1", "--fresh"]
    assert _option_overrides(parse(build_parser(), line)) == [
        "cluster.nodes=2",
        "cluster.rendezvous=h:1",
        "cluster.node_rank=1",
        "checkpoint.resume=false",
    ]
    assert _option_overrides(parse(build_parser(), ["train", "a.toml"])) == []
