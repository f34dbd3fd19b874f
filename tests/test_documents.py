"""Links of the documents lead somewhere. Their blocks: test_pages.py; the site: test_site.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages.blocks import all_pages, page_name


@pytest.mark.parametrize("page", all_pages(), ids=page_name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
