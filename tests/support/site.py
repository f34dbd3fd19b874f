"""Builder of the site of docs/: `make docs`, or `python -m support.site` with what the extra `docs` installs.

A link from a page to a file outside docs/ works in the repository as it stands. For the site such a file
becomes a page too: a document as it is, code as a block, a folder as the list of its files. A dead link, a
dead anchor, or anything that a reader's browser would load from another server fails the build.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
CONFIGURATION = REPOSITORY / "mkdocs.yml"
BUILD = REPOSITORY / "build"
SOURCE = BUILD / "site-source"
SITE = BUILD / "site"
WORKER = "site/iframe-worker.js"
"""Script that lets the search run in pages opened as files. Zensical names it on a server of others."""
MESSAGES = "reference/messages.html"
"""Page with nearly every word of the site, in sections named after modules."""
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json", ".txt": "text", ".yml": "yaml"}
EXAMPLES = REPOSITORY / "examples"
_NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of pages of source files and folders, whose names would rank above the documents."""
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
_REMOTE_WORKER = re.compile(r"https://unpkg\.com/iframe-worker/shim")
_LOADED_BY_CLASS = ("mermaid", "pyodide", "glightbox")
"""Classes of elements for which the theme loads a script from another server."""


def main() -> int:
    """Build the site and check it; return an exit code."""
    pages = stage()
    program = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "-f",
        str(BUILD / "mkdocs.yml"),
    ]
    code = subprocess.run(program, env={**os.environ, "NO_COLOR": "1"}, check=False).returncode
    if code:
        return code
    use_own_worker(SITE)
    rank_last(SITE, MESSAGES)
    wrong = [*dead_links(SITE), *foreign_assets(SITE)]
    print(*wrong, sep="\n" if wrong else "")
    print(f"{SITE / 'index.html'}: {pages} pages, {len(wrong)} mistakes")
    return 1 if wrong else 0


def stage() -> int:
    """Write the sources of the site into `SOURCE`; return the number of pages."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(DOCS, SOURCE)
    done: set[Path] = set()
    todo = {*DOCS.rglob("*.md"), EXAMPLES, *_files(EXAMPLES)}
    while todo:
        path = todo.pop()
        done.add(path)
        text, linked = page_text(path)
        place = SOURCE / staged_name(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        todo |= linked - done
    configuration = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    configuration |= {"docs_dir": SOURCE.name, "site_dir": SITE.name}
    handler = configuration["plugins"][-1]["mkdocstrings"]["handlers"]["python"]
    handler["paths"] = [str(REPOSITORY / "src")]
    examples = [staged_name(path) for path in (EXAMPLES, *sorted(_files(EXAMPLES)))]
    configuration["nav"].append({"Examples": examples})
    (BUILD / "mkdocs.yml").write_text(yaml.safe_dump(configuration, sort_keys=False), encoding="utf-8")
    return len(done)


def staged_name(path: Path) -> str:
    """Return the name below the site's docs of the page for a file or folder of the repository."""
    if path.is_relative_to(DOCS):
        return str(path.relative_to(DOCS))
    name = str(path.relative_to(REPOSITORY))
    return f"{name}/index.md" if path.is_dir() else name if path.suffix == ".md" else f"{name}.md"


def page_text(path: Path) -> tuple[str, set[Path]]:
    """Return the Markdown of the page for a file or folder, and what it links to that becomes a page too."""
    linked: set[Path] = set()

    def rewritten(match: re.Match[str]) -> str:
        target = (path.parent / unquote(match[2])).resolve()
        if not target.exists():
            return match[0]  # the build refuses it
        if target.is_relative_to(DOCS) and target.is_dir():
            target /= "index.md"
        if target.is_relative_to(DOCS) and target.suffix != ".md":
            return match[0]
        linked.update({target, *(_files(target) if target.is_dir() else ())})
        place = os.path.relpath(staged_name(target), Path(staged_name(path)).parent)
        return f"{match[1]}{place}{match[3] or ''}{match[4]}"

    head = "" if path.is_relative_to(EXAMPLES) else _NOT_SEARCHED
    if path.is_dir():
        names = sorted(_files(path))
        linked.update(names)
        lines = [
            f"- [{file.name}]({file.name}{'' if file.suffix == '.md' else '.md'}){_about(file)}"
            for file in names
        ]
        return head + "\n".join([f"# {path.name.capitalize()}", "", *lines, ""]), linked
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _outside_of_fences(text, lambda part: _LINK.sub(rewritten, part)), linked
    fence = "````"
    return f"{head}# {path.name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}{fence}\n", linked


def use_own_worker(site: Path) -> None:
    """Let pages load the script for the search from the site itself."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        own = os.path.relpath(site / WORKER, page.parent)
        page.write_text(_REMOTE_WORKER.sub(own, text), encoding="utf-8")


def rank_last(site: Path, page: str) -> None:
    """Let the search find the sections of `page` by their text only, and after equal matches of other pages.

    Zensical's search has no weight for a page, and ranks a word in a title above one in the text.
    """
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    ours = [item for item in index["items"] if item["location"].partition("#")[0] == page]
    others = [item for item in index["items"] if item not in ours]
    title = ours[0]["title"]
    index["items"] = [*others, *({**item, "title": title} for item in ours)]
    text = json.dumps(index, ensure_ascii=False)
    (site / "search.json").write_text(text, encoding="utf-8")
    (site / "search.js").write_text(f"var __index = {text};", encoding="utf-8")


def dead_links(site: Path) -> list[str]:
    """Return the links of the site's pages that lead to no file or to no place in it."""
    pages = {page: Elements(page) for page in sorted(site.rglob("*.html"))}
    wrong = []
    for page, elements in pages.items():
        if page.name == "404.html":
            continue  # its links are those of the server's root
        for link in elements.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                wrong.append(f"{page.relative_to(site)}: dead link: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                wrong.append(f"{page.relative_to(site)}: dead anchor: {link}")
    return wrong


def foreign_assets(site: Path) -> list[str]:
    """Return what the site's pages would load from other servers."""
    wrong = []
    for page in sorted(site.rglob("*.html")):
        elements = Elements(page)
        wrong += [f"{page.relative_to(site)}: loads {url}" for url in elements.assets if _is_foreign(url)]
        wrong += [
            f"{page.relative_to(site)}: the theme loads a script for elements of class {name}"
            for name in _LOADED_BY_CLASS
            if name in elements.classes
        ]
    for sheet in sorted(site.rglob("*.css")):
        urls = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", sheet.read_text(encoding="utf-8"))
        wrong += [f"{sheet.relative_to(site)}: loads {url}" for url in urls if _is_foreign(url)]
    return wrong


class Elements(HTMLParser):
    """Links, anchors, classes and loaded files of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.names: set[str] = set()
        self.classes: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        self.classes.update(values.get("class", "").split())
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.assets.append(values.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object"):
            self.assets += [values[name] for name in ("src", "data", "srcset") if name in values]


def _is_foreign(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in ("http", "https", "ftp")


def _files(folder: Path) -> Iterator[Path]:
    """Return the files directly in the folder that a page can show."""
    return (path for path in folder.iterdir() if path.suffix in (*LANGUAGES, ".md") and path.is_file())


def _about(path: Path) -> str:
    """Return the first sentence of the file's own comment or docstring."""
    first = path.read_text(encoding="utf-8").lstrip("#\"' \n").partition("\n")[0].strip("\"' ")
    return f": {first}" if path.suffix in (".py", ".toml") and first else ""


def _outside_of_fences(text: str, change: object) -> str:
    """Apply `change` to the parts of the text that are no fenced blocks."""
    assert callable(change)
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


if __name__ == "__main__":
    sys.exit(main())
