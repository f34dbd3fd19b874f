"""Statements of the documents: their links lead somewhere and their commands are accepted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wanma.cli.parser import build_parser, parse
from wanma.job.file.loading import parse_override
from wanma.job.file.schema import schema_keys

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@each_page
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@each_page
def test_every_command_is_one_that_wanma_accepts(page: Path) -> None:
    for line in re.findall(r"^ {4}wanma (.*)$", page.read_text(), re.MULTILINE):
        parsed = parse(build_parser(), shlex.split(line, comments=True))
        for override in getattr(parsed, "overrides", []):
            path = ".".join(parse_override(override).path)
            assert path in schema_keys() or path == "parallel", f"{line}: there is no key {path}"


def test_the_site_lists_all_its_pages() -> None:
    docs = REPOSITORY / "docs"
    listed = set(re.findall(r"([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} == listed
