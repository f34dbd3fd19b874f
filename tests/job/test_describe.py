"""The schema in words is the schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from wanma.job.file.loading import to_job
from wanma.job.file.reference import reference_markdown, template_toml
from wanma.job.file.schema import schema_keys, schema_tables
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection

REPOSITORY = Path(__file__).parents[2]


def test_every_key_has_one_line_of_help() -> None:
    assert [path for path, key in schema_keys().items() if not key.help or "\n" in key.help] == []
    assert [table.path for table in schema_tables() if not table.help or "\n" in table.help] == []


def test_a_key_says_what_it_allows() -> None:
    told = schema_keys()
    assert told["train.steps"].allowed == "a whole number > 0 and <= 1,000,000,000,000"
    assert told["train.momentum"].allowed == "a number >= 0 and < 1"
    assert told["train.precision"].allowed == "one of fp64, fp32, bf16, fp16"
    assert told["parallel.shard"].choices == ("none", "optimizer", "gradients", "parameters")
    assert told["data.sources"].allowed == "a list of tables"
    assert told["data.sources.text"].allowed == "a list of text"
    assert told["model.lora_targets"].allowed.endswith("(at least one)")
    assert told["train.betas"].allowed == "[number, number]"
    assert told["model.arguments"].allowed == "a table"
    assert (told["data.sources.name"].is_required, told["train.steps"].is_required) == (True, False)


def test_the_starter_file_is_a_valid_job_with_nothing_but_defaults() -> None:
    job = to_job(tomllib.loads(template_toml()))
    assert job.data.text == ["stdlib"]
    assert to_job(job, ["data.text="]) == Job(model=ModelSection(preset="gpt-10m"))


def test_the_starter_file_shows_every_key_at_its_default() -> None:
    shown = set()
    table = ""
    for line in template_toml().splitlines():
        if header := re.fullmatch(r"(?:# )?\[\[?([a-z_.]+)\]\]?", line):
            table = header[1]
        elif setting := re.match(r"(?:# )?([a-z_0-9]+) = *(.*?) *  # ", line):
            key = schema_keys()[f"{table}.{setting[1]}"]
            shown.add(key.path)
            if line.startswith("#") and setting[2]:
                (value,) = tomllib.loads(f"value = {setting[2]}").values()
                assert value == (list(key.default) if isinstance(key.default, tuple) else key.default)
    assert shown == set(schema_keys())


def test_the_guide_is_what_the_command_prints() -> None:
    page = REPOSITORY / "docs" / "reference" / "job-file.md"
    assert page.read_text() == reference_markdown(), "run: wanma job --markdown > docs/reference/job-file.md"
