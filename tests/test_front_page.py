"""Files beside the source: the README and its translation, the changelog and the citation."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from support.pages.blocks import Block, read_page

REPOSITORY = Path(__file__).parents[1]
ENGLISH = REPOSITORY / "README.md"
CHINESE = REPOSITORY / "README.zh-CN.md"
LANGUAGE_LINKS = {"README.md", "README.zh-CN.md"}
LONGEST_README = 120
LARGEST_PICTURE_BYTES = 150_000

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_MARKS = "●◐–"


def version() -> str:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def without_comments(block: Block) -> tuple[str, str, str]:
    """Return what a reader runs or reads of a block, whatever the language of its comments."""
    lines = [line.partition(" #")[0].rstrip() for line in block.text.splitlines()]
    return block.language, block.title, "\n".join(lines)


def prose(path: Path) -> str:
    """Return the text outside of blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def numbers(path: Path) -> Counter[str]:
    """Return the numbers of the text outside of blocks, links and code."""
    return Counter(_NUMBER.findall(_CODE.sub("", _LINK.sub("]", prose(path)))))


def rows(path: Path) -> list[list[tuple[list[str], list[str], list[str], list[str]]]]:
    """Return the cells of all tables: their code, links, numbers and marks."""
    return [
        [
            (
                sorted(_CODE.findall(cell)),
                sorted(_LINK.findall(cell)),
                sorted(_NUMBER.findall(_LINK.sub("]", cell))),
                [mark for mark in cell if mark in _MARKS],
            )
            for cell in line.strip("|").split("|")
        ]
        for line in prose(path).splitlines()
        if line.startswith("|")
    ]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(ENGLISH.read_text().splitlines()) <= LONGEST_README


def test_pictures_of_the_readme_are_small() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", ENGLISH.read_text())
    assert pictures
    assert [name for name in pictures if (REPOSITORY / name).stat().st_size > LARGEST_PICTURE_BYTES] == []


def test_the_translation_has_the_same_commands_and_output() -> None:
    english, chinese = (list(map(without_comments, read_page(path).blocks)) for path in (ENGLISH, CHINESE))
    assert chinese == english
    assert any(language == "console" for language, _, _ in english)


def test_the_translation_has_the_same_tables() -> None:
    assert rows(CHINESE) == rows(ENGLISH)
    assert len(rows(ENGLISH)) > 20


def test_the_translation_has_the_same_figures() -> None:
    english = numbers(ENGLISH)
    assert numbers(CHINESE) == english
    assert english["3.11"] == 1


def test_the_translation_has_the_same_links_code_and_sections() -> None:
    english, chinese = prose(ENGLISH), prose(CHINESE)
    for pattern in (_LINK, _CODE):
        assert Counter(pattern.findall(chinese)) - Counter(LANGUAGE_LINKS) == Counter(
            pattern.findall(english)
        ) - Counter(LANGUAGE_LINKS)
    headings = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (english, chinese)]
    assert headings[0] == headings[1]


def test_the_translation_uses_chinese_punctuation() -> None:
    text = _CODE.sub("", _LINK.sub("]", prose(CHINESE)))
    assert re.findall(r"[一-鿿][,;:?!()]|[,;:?!(][一-鿿]", text) == []


def test_the_changelog_has_the_version_of_the_package() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d{2}-\d{2}))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert version() in dict(headings)
    dates = [date for _, date in headings[1:]]
    assert dates == sorted(dates, reverse=True)
    assert "" not in dates
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "To do when you update"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_links_lead_to_files_and_sections(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    wrong = []
    for link in _LINK.findall(text):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = REPOSITORY / (target or name)
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(link)
    assert wrong == []


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_citation_is_valid_and_of_this_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    required = {"cff-version": str, "message": str, "title": str, "authors": list}
    assert {key: type(citation[key]) for key in required} == required
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    optional = {
        "type",
        "abstract",
        "version",
        "license",
        "keywords",
        "date-released",
        "repository-code",
        "url",
        "doi",
    }
    assert citation.keys() <= required.keys() | optional
    assert all(
        author.keys() <= {"name", "website"} or {"family-names", "given-names"} <= author.keys()
        for author in citation["authors"]
    )
    assert all(isinstance(word, str) for word in citation["keywords"])
    assert str(citation["version"]) == version()
    assert citation["license"] == "Apache-2.0"
