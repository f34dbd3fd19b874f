"""Checks of a page's blocks that run nothing: commands, keys, jobs and code are accepted."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from support.pages.blocks import LANGUAGES, Block, Page, PageError
from wanma.cli.parser import build_parser, parse
from wanma.hardware.cluster_file.reader import load_cluster_file
from wanma.hardware.cluster_file.schema import ClusterFile
from wanma.job.errors import JobError
from wanma.job.file.loading import parse_override, to_job
from wanma.job.file.renamed_keys import with_new_names
from wanma.job.file.schema import schema_keys
from wanma.job.sections.job import Job

OLD_COMMAND = re.compile(r"^ {4}wanma (.*)$", re.MULTILINE)
"""A command in an indented block: the form of pages that are still to be converted."""
_SHELL = re.compile(r"[|<>;`*?~]|&|\$")
_FIRST_NODES = '[[nodes]]\ncount = 2\ndevices = 8\ndevice = "H100 SXM"\n'
_FIRST_JOB = {"model": {"preset": "gpt-1m"}}


def mistakes(page: Page) -> list[str]:
    """Return what is wrong with the page's blocks, each with its place."""
    found = []
    for block in page.blocks:
        try:
            found += [f"{block.place}: {text}" for text in _of_block(block, page)]
        except PageError as error:
            found.append(str(error))
    return found


def form_mistakes(page: Page) -> list[str]:
    """Return what the page lacks: languages of blocks, and a block that runs or a reason why none does."""
    if page.is_recorded:
        return []
    found = [
        f"{block.place}: a block of language {block.language or '(none)'}; known: {', '.join(LANGUAGES)}"
        for block in page.blocks
        if block.language not in LANGUAGES
    ]
    for match in OLD_COMMAND.finditer(page.path.read_text(encoding="utf-8")):
        if not any(f"wanma {match[1]}" in block.text for block in page.blocks):
            found.append(f"{page.name}: an indented command; write a console block: wanma {match[1]}")
    runs = bool(page.blocks_to_run())
    if runs == bool(page.reason_not_runnable):
        found.append(
            f"{page.name}: it has blocks to run, and says in its front matter that it has none"
            if runs
            else f'{page.name}: no block to run; write one, or in its front matter: runnable: "no: a table"'
        )
    return found


def old_command_mistakes(page: Page) -> list[str]:
    """Return what is wrong with the commands in the indented blocks of the page."""
    found = []
    for match in OLD_COMMAND.finditer(page.path.read_text(encoding="utf-8")):
        found += [f"{page.name}: {text}" for text in _wanma_mistakes(shlex.split(match[1], comments=True))]
    return found


def words(command: str) -> list[str] | None:
    """Return the command's words, or None where only a shell understands it."""
    without_comment = shlex.split(command, comments=True)
    bare = re.sub(r"'[^']*'|\"[^\"$`]*\"", "", command.partition(" #")[0])
    return None if _SHELL.search(bare) else without_comment


def first_job(page: Page) -> dict[str, Any]:
    """Return the tables of the page's first complete job, with which its partial jobs are merged."""
    for block in page.blocks:
        if block.language == "toml":
            tables = tomllib.loads(block.text)
            if _is_job(tables) and "model" in tables:
                return tables
    return _FIRST_JOB


def _of_block(block: Block, page: Page) -> Iterator[str]:
    if block.language == "console":
        commands = block.commands()
        if block.arguments and len(commands) > 1:
            yield "<!-- run: --> needs a block of one command"
        for command in commands:
            for part in re.split(r"\|\|?|&&|;", command.text):
                yield from _command_mistakes(part)
    elif block.language == "python":
        try:
            compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            yield f"{error.msg}, line {block.line + (error.lineno or 0)}"
    elif block.language == "toml":
        yield from _toml_mistakes(block, page)
    elif block.language == "yaml":
        try:
            list(yaml.safe_load_all(block.text))
        except yaml.YAMLError as error:
            yield str(error)
    elif block.language == "json":
        try:
            json.loads(block.text)
        except ValueError as error:
            yield str(error)


def _command_mistakes(command: str) -> list[str]:
    try:
        parts = shlex.split(command, comments=True)
    except ValueError as error:
        return [f"{error}: {command}"]
    while parts and re.fullmatch(r"\w+=.*", parts[0]):
        del parts[0]
    if not parts or parts[0] != "wanma":
        return []
    end = next((i for i, part in enumerate(parts) if part in ("&", ">", ">>", "<", "2>&1", "2>")), len(parts))
    return _wanma_mistakes(parts[1:end])


def _wanma_mistakes(arguments: list[str]) -> list[str]:
    line = shlex.join(["wanma", *arguments])
    if "--help" in arguments or "--version" in arguments:
        return []
    try:
        parsed = parse(build_parser(), arguments)
        paths = [".".join(parse_override(text).path) for text in getattr(parsed, "overrides", [])]
    except JobError as error:
        return [f"{line}: {error.message}"]
    known = schema_keys()
    return [
        f"{line}: there is no key {path}"
        for path in paths
        if path not in known and path not in Job.model_fields
    ]


def _toml_mistakes(block: Block, page: Page) -> list[str]:
    try:
        tables = tomllib.loads(block.text)
    except tomllib.TOMLDecodeError as error:
        return [str(error)]
    if block.exit_code or (block.title and not _is_job(tables)):
        return []  # read by the command that uses it
    if tables and tables.keys() <= ClusterFile.model_fields.keys():
        return _cluster_mistakes(block.text if "nodes" in tables else f"{block.text}\n{_FIRST_NODES}")
    if page.is_recorded:
        tables = with_new_names(tables)  # recorded under the names of their day
    merged = {**first_job(page)}
    for name, section in tables.items():
        is_table = isinstance(section, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **section} if is_table else section
    errors = []
    for candidate in (tables if "model" in tables else merged, merged):
        try:
            to_job(candidate)
            return []
        except JobError as error:
            errors.append(error.message)
    return [f"not valid with the page's first job: {errors[-1]}"]


def _cluster_mistakes(text: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        try:
            load_cluster_file(path)
        except JobError as error:
            return [error.message]
    return []


def _is_job(tables: dict[str, Any]) -> bool:
    return bool(tables) and tables.keys() <= Job.model_fields.keys()
