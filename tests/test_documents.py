"""Links of the documents lead somewhere, and the site lists every page; their blocks: test_pages.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages.blocks import all_pages, page_name

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_site_lists_all_its_pages() -> None:
    docs = REPOSITORY / "docs"
    listed = set(re.findall(r"([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} == listed
