"""Guides for users of other tools: what they name of wanma exists, and they leave out nothing of the tool."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

import wanma
from support.command import Desk
from wanma.cli.parser import build_parser, parse
from wanma.job.errors import JobError
from wanma.job.file.loading import parse_override, to_job
from wanma.job.file.schema import schema_keys, schema_tables
from wanma.training.loop.session import Session

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted((REPOSITORY / "docs" / "guides" / "from").glob("*.md"))
SOURCE = Path(wanma.__file__).parents[1]
PEERS = REPOSITORY / ".venv-peers" / "bin" / "python"
JOBS: tuple[dict[str, Any], ...] = (
    {"model": {"preset": "gpt-1m"}},
    {"model": {"family": "decoder"}},
    {"model": {"preset": "gpt-moe-3m"}},
    {"model": {}},
)
"""Jobs of which one must accept a value that a table names."""

needs_peers = pytest.mark.skipif(not PEERS.exists(), reason="needs Accelerate, Lightning and TRL: make peers")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@dataclass(frozen=True)
class Row:
    """A row of a table with a column of wanma's."""

    line: int
    theirs: str
    ours: str


def rows(page: Path) -> list[Row]:
    """Return the rows of every table whose second column is wanma's."""
    found: list[Row] = []
    is_table = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            is_table = False
        elif not is_table:
            is_table = len(cells) > 1 and cells[1] == "wanma"
        elif set(cells[0]) != {"-"}:
            found.append(Row(number, cells[0], cells[1]))
    return found


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def named(page: Path) -> set[str]:
    """Return the names of the other tool that the page's tables explain, without arguments."""
    return {re.split(r"[=(\s]", code)[0] for row in rows(page) for code in codes(row.theirs)}


def blocks(page: Path) -> dict[str, str]:
    """Return the page's blocks with a title, by title."""
    return dict(
        re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)
    )


def mistake(code: str) -> str | None:
    """Return what is wrong with a key, a value, a call or a command of wanma."""
    if code.startswith("wanma "):
        try:
            parsed = parse(build_parser(), shlex.split(code)[1:])
        except JobError as error:
            return error.message
        paths = [".".join(parse_override(text).path) for text in getattr(parsed, "overrides", [])]
        return next(
            (f"no key {path}" for path in paths if path not in schema_keys() and path != "parallel"), None
        )
    if call := re.fullmatch(r"(wanma|session)\.([\w.]+)(?:\((.*)\))?", code):
        found: Any = wanma if call[1] == "wanma" else Session
        for name in call[2].split("."):
            if not hasattr(found, name):
                return f"no {name} in {found}"
            found = getattr(found, name)
        arguments = re.findall(r"(\w+)=", call[3] or "")
        known = inspect.signature(found).parameters if arguments else {}
        return next((f"no argument {name}" for name in arguments if name not in known), None)
    if code.startswith("[["):
        return None if code in {table.header for table in schema_tables()} else f"no table {code}"
    assignment = re.fullmatch(r"([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?: = (.+))?", code)
    if assignment is None:
        return "neither a key, a value, a call nor a command"
    key, value = assignment[1], assignment[2]
    if key not in schema_keys() and key != "parallel":
        return f"no key {key}"
    if value is None:
        return None
    tomllib.loads(f"value = {value}")
    return _value_mistake(key, value)


def _value_mistake(key: str, value: str) -> str | None:
    errors = []
    for job in JOBS:
        try:
            to_job(job, [f"{key}={value}"])
            return None
        except JobError as error:
            errors.append(error.message)
    return errors[0]


@each_page
def test_every_row_names_valid_keys_values_calls_and_commands(page: Path) -> None:
    assert len(rows(page)) > 10
    found = []
    for row in rows(page):
        is_reason = re.match(r"not (needed|here): \S", row.ours)
        if not is_reason and not codes(row.ours):
            found.append(f"{page.name}:{row.line}: neither code nor a reason: {row.ours}")
        found += [
            f"{page.name}:{row.line}: {code}: {wrong}"
            for code in codes(row.ours)
            if not is_reason and (wrong := mistake(code))
        ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("train.stepss", "no key train.stepss"),
        ("train.steps = -1", "train.steps"),
        ('parallel.shard = "everything"', "parallel.shard"),
        ("wanma.train(modle=...)", "no argument modle"),
        ("session.stepp", "no stepp"),
        ("wanma plan job.toml parallel.tpp=2", "no key parallel.tpp"),
        ("[[train.groups]]", "no table"),
    ],
)
def test_a_wrong_right_hand_side_is_found(code: str, wrong: str) -> None:
    assert wrong in (mistake(code) or "")


@each_page
def test_every_job_of_the_page_is_valid(page: Path) -> None:
    jobs = {title: text for title, text in blocks(page).items() if re.fullmatch(r"\w*job\w*\.toml", title)}
    assert jobs
    for text in jobs.values():
        tables = tomllib.loads(text)
        to_job(tables if "model" in tables else {**JOBS[0], **tables})


@each_page
def test_the_tables_explain_every_key_of_the_shown_configuration(page: Path) -> None:
    known = named(page)
    for title, text in blocks(page).items():
        assert [key for key in _configuration_keys(title, text) if key not in known] == [], title


def _configuration_keys(title: str, text: str) -> list[str]:
    """Return the keys or flags of another tool's configuration; none for wanma's jobs and for programs."""
    if title.endswith(".sh"):
        return re.findall(r"(?<=\s)(--[a-z][\w-]*)", text)
    if title.endswith(".json"):
        return list(_leaves(json.loads(text)))
    if title.endswith((".yaml", ".yml")):
        return list(_leaves(yaml.safe_load(text)))
    if title.endswith(".toml") and "job" not in title:
        return list(_leaves(tomllib.loads(text)))
    return []


def _leaves(tables: dict[str, Any], within: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{within}{key}.")
        else:
            yield f"{within}{key}"


def page(name: str) -> Path:
    return REPOSITORY / "docs" / "guides" / "from" / f"{name}.md"


def test_the_page_on_ddp_explains_every_argument_of_the_installed_torch() -> None:
    arguments = set(inspect.signature(DistributedDataParallel).parameters)
    options = {
        next(option for option in action.option_strings if option.startswith("--"))
        for action in get_args_parser()._actions
        if action.option_strings and action.dest != "help"
    }
    assert (arguments | options) - named(page("torchrun-ddp")) == set()


def test_the_page_on_fsdp2_explains_every_argument_of_the_installed_torch() -> None:
    named_here = named(page("fsdp2"))
    for function in (fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy):
        assert set(inspect.signature(function).parameters) - named_here == set()
    methods = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert methods - named_here == set()


def desk(folder: Path, name: str) -> Desk:
    """Make a folder with the files that the page shows."""
    made = Desk(folder, modules=folder)
    for title, text in blocks(page(name)).items():
        (folder / title).write_text(text)
    return made


def losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\bloss (\d+\.\d{5})\b", text)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "before", "steps"), [("torchrun-ddp", "ddp.py", 16), ("fsdp2", "fsdp.py", 8)]
)
def test_the_script_and_the_job_of_a_page_train_to_the_same_losses(
    tmp_path: Path, name: str, before: str, steps: int
) -> None:
    here = desk(tmp_path, name)
    theirs = here.run("launch", "--ranks", "2", "--show", "0", before)
    ours = here.start_program([sys.executable, "train.py"]).end()
    assert (theirs.code, ours.code) == (0, 0), theirs.text + ours.text
    recorded = here.training("runs/job").losses
    assert len(recorded) == steps
    assert recorded == pytest.approx(losses(theirs.out), abs=2e-5)


@pytest.mark.full
def test_the_loop_of_the_page_on_ddp_trains_to_the_losses_of_its_script(tmp_path: Path) -> None:
    here = desk(tmp_path, "torchrun-ddp")
    theirs = here.run("launch", "--ranks", "2", "--show", "0", "ddp.py")
    ours = here.run("launch", "--ranks", "2", "loop.py")
    ours.check()
    assert here.training("runs/loop").losses == pytest.approx(losses(theirs.out), abs=2e-5)


def _arguments_in_peers(expression: str) -> set[str]:
    """Return the arguments of a class of the peers, read in their own environment."""
    module, name = expression.rsplit(".", 1)
    code = f"import inspect; from {module} import {name}; print(*inspect.signature({name}).parameters)"
    ran = subprocess.run([str(PEERS), "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(ran.stdout.split())


@needs_peers
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "signature"), [("accelerate", "accelerate.Accelerator"), ("lightning", "lightning.Trainer")]
)
def test_the_page_explains_every_argument_of_the_installed_version(name: str, signature: str) -> None:
    assert _arguments_in_peers(signature) - named(page(name)) == set()


@needs_peers
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "before"), [("accelerate", "accelerate_loop.py"), ("lightning", "lightning_train.py")]
)
def test_the_script_of_a_peer_and_its_job_train_to_the_same_losses(
    tmp_path: Path, name: str, before: str
) -> None:
    here = desk(tmp_path, name)
    launch = [str(PEERS), "-m", "wanma", "launch", "--ranks", "2", "--show", "0", before]
    theirs = here.start_program(launch, PYTHONPATH=f"{SOURCE}:{tmp_path}").end(240)
    if name == "accelerate":
        ours, run = here.run("launch", "--ranks", "2", "loop.py"), "runs/loop"
    else:
        ours, run = here.start_program([sys.executable, "train.py"]).end(), "runs/job"
    recorded = here.training(run).losses
    assert (theirs.code, ours.code) == (0, 0), theirs.text + ours.text
    assert len(recorded) == 8
    assert recorded == pytest.approx(losses(theirs.out), abs=2e-5)
