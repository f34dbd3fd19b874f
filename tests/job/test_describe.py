"""The schema in words is the schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from wanma.job.file.loading import job_from
from wanma.job.file.reference import markdown, starter_toml
from wanma.job.file.schema import keys, tables
from wanma.job.sections.job import Job, ModelSection

REPOSITORY = Path(__file__).parents[2]


def test_every_key_has_one_line_of_help() -> None:
    assert [path for path, key in keys().items() if not key.help or "\n" in key.help] == []
    assert [table.path for table in tables() if not table.help or "\n" in table.help] == []


def test_a_key_says_what_it_allows() -> None:
    told = keys()
    assert told["train.steps"].allowed == "a whole number > 0 and <= 1,000,000,000,000"
    assert told["train.momentum"].allowed == "a number >= 0 and < 1"
    assert told["train.precision"].allowed == "one of fp64, fp32, bf16, fp16"
    assert told["parallel.shard"].choices == ("none", "optimizer", "gradients", "parameters")
    assert told["data.sources"].allowed == "a list of tables"
    assert told["data.sources.text"].allowed == "a list of text (at least one)"
    assert told["train.betas"].allowed == "[number, number]"
    assert told["model.arguments"].allowed == "a table"
    assert (told["data.sources.name"].required, told["train.steps"].required) == (True, False)


def test_the_starter_file_is_a_valid_job_with_nothing_but_defaults() -> None:
    job = job_from(tomllib.loads(starter_toml()))
    assert job.data.text == ["stdlib"]
    assert job_from(job, ["data.text="]) == Job(model=ModelSection(preset="gpt-10m"))


def test_the_starter_file_shows_every_key_at_its_default() -> None:
    shown = set()
    table = ""
    for line in starter_toml().splitlines():
        if header := re.fullmatch(r"(?:# )?\[\[?([a-z_.]+)\]\]?", line):
            table = header[1]
        elif setting := re.match(r"(?:# )?([a-z_0-9]+) = *(.*?) *  # ", line):
            key = keys()[f"{table}.{setting[1]}"]
            shown.add(key.path)
            if line.startswith("#") and setting[2]:
                (value,) = tomllib.loads(f"value = {setting[2]}").values()
                assert value == (list(key.default) if isinstance(key.default, tuple) else key.default)
    assert shown == set(keys())


def test_the_guide_is_what_the_command_prints() -> None:
    page = REPOSITORY / "docs" / "job-file.md"
    assert page.read_text() == markdown(), "run: wanma job --markdown > docs/job-file.md"
