"""The pages of the site, those of files outside docs/, and the checks of what `make docs` has built."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import wanma
from support.site import (
    CONFIGURATION,
    DOCS,
    REPOSITORY,
    WORKER,
    dead_links,
    foreign_assets,
    page_text,
    rank_last,
    staged_name,
    use_own_worker,
)


def site(folder: Path, **pages: str) -> Path:
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


def test_the_site_lists_all_its_pages() -> None:
    listed = re.findall(r"([\w/-]+\.md)$", CONFIGURATION.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_page_of_the_python_api_has_all_public_names() -> None:
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    described = re.findall(r"^::: wanma\.(\w+)$", text, re.MULTILINE)
    assert sorted(described) == sorted(wanma.__all__)


def test_a_linked_file_outside_of_docs_becomes_a_page() -> None:
    text, linked = page_text(DOCS / "guides" / "custom-loop.md")
    assert "](../../examples/" not in text
    assert "](../examples/own_loop.py.md)" in text
    assert REPOSITORY / "examples" / "own_loop.py" in linked
    code, _ = page_text(REPOSITORY / "examples" / "own_loop.py")
    assert code.startswith("# own_loop.py\n\n````python\n")


def test_the_search_finds_examples_but_no_other_source_files() -> None:
    excluded = "---\nsearch:\n  exclude: true\n---\n\n"
    for path in (REPOSITORY / "benchmarks" / "common.py", REPOSITORY / "benchmarks" / "planner"):
        assert page_text(path)[0].startswith(f"{excluded}# ")
    for path in (REPOSITORY / "examples" / "own_loop.py", REPOSITORY / "examples"):
        assert page_text(path)[0].startswith("# ")


def test_a_linked_folder_becomes_a_list_of_its_files() -> None:
    text, linked = page_text(REPOSITORY / "examples")
    assert "- [gpt.toml](gpt.toml.md): A small GPT" in text
    assert REPOSITORY / "examples" / "gpt.toml" in linked
    assert staged_name(REPOSITORY / "examples") == "examples/index.md"


def test_links_in_blocks_of_code_stay(tmp_path: Path) -> None:
    page = DOCS / "index.md"
    text, _ = page_text(page)
    assert page.read_text(encoding="utf-8").count("```") == text.count("```")


def test_the_search_loads_its_worker_from_the_site(tmp_path: Path) -> None:
    folder = site(tmp_path, index='<script src="https://unpkg.com/iframe-worker/shim"></script>')
    assert foreign_assets(folder) == ["index.html: loads https://unpkg.com/iframe-worker/shim"]
    use_own_worker(folder)
    assert (folder / "index.html").read_text() == f'<script src="{WORKER}"></script>'
    assert (DOCS / WORKER).read_text(encoding="utf-8").startswith("/*! iframe-worker")


def test_a_page_that_ranks_last_is_found_by_its_text_only(tmp_path: Path) -> None:
    def item(location: str, title: str) -> dict[str, str]:
        return {"location": location, "title": title, "text": f"text of {location}"}

    first, second = item("messages.html", "Messages"), item("messages.html#loss", "training.loss")
    other = item("losses.html#loss", "Loss")
    (tmp_path / "search.json").write_text(json.dumps({"config": {}, "items": [first, second, other]}))
    rank_last(tmp_path, "messages.html")
    text = (tmp_path / "search.json").read_text()
    assert json.loads(text) == {"config": {}, "items": [other, first, second | {"title": "Messages"}]}
    assert (tmp_path / "search.js").read_text() == f"var __index = {text};"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<img src="//cdn.example.org/a.png">', "loads //cdn.example.org/a.png"),
        ('<link rel="stylesheet" href="https://fonts.example.org/a.css">', "loads https://fonts"),
        ('<link rel="preconnect" href="https://fonts.example.org">', "loads https://fonts"),
        ('<pre class="mermaid">graph</pre>', "for elements of class mermaid"),
    ],
)
def test_what_would_be_loaded_from_another_server_is_found(tmp_path: Path, page: str, found: str) -> None:
    (mistake,) = foreign_assets(site(tmp_path, index=page))
    assert found in mistake


def test_style_sheets_load_nothing_from_other_servers(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import 'https://a.org/b.css'; a { background: url(images/b.svg) }")
    assert foreign_assets(tmp_path) == ["a.css: loads https://a.org/b.css"]


def test_links_to_other_servers_and_own_assets_are_allowed(tmp_path: Path) -> None:
    page = '<a href="https://arxiv.org/abs/1">x</a><img src="images/a.svg"><link rel="canonical" href="https://w.org">'
    assert foreign_assets(site(tmp_path, index=page)) == []


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    folder = site(
        tmp_path,
        index='<a href="other.html#here">x</a><a href="other.html#there">y</a><a href="none.html">z</a>',
        other='<h2 id="here">h</h2><a href="#away">w</a><a href="index.html">v</a>',
    )
    assert dead_links(folder) == [
        "index.html: dead anchor: other.html#there",
        "index.html: dead link: none.html",
        "other.html: dead anchor: #away",
    ]
