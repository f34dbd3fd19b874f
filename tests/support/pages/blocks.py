"""Parts of a page: its front matter and its fenced blocks, each with the comments that say how it is run.

<!-- run: train.steps=4 -->          arguments appended to the block's one command, in the test only
<!-- exit: 2 -->                     exit code of the block's last command
<!-- not run: needs Slurm -->        the block is only checked
```console                           commands after `$ `, each followed by what it prints
```toml title="job.toml"             a file with that name; any language
```python                            code; all of a page shares one namespace
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[3]
LANGUAGES = ("console", "toml", "python", "yaml", "json", "text", "sh", "xml", "svg", "css", "javascript")
"""Languages of blocks. Nothing checks what a `text` block shows."""
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})[ ]*([\w+-]*)(.*)$")
_COMMENT = re.compile(r"^ *<!-- *(run|exit|not run): *(.*?) *-->$")
_TITLE = re.compile(r'title="([^"]+)"')


class PageError(Exception):
    """A mistake in a page, with the page and the line."""


@dataclass(frozen=True)
class Command:
    """A command line of a console block, and the lines that it prints."""

    text: str
    line: int
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str
    arguments: str = ""
    exit_code: int = 0
    reason_not_run: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[Command]:
        """Return the commands of a console block, with their output.

        Raises:
            PageError: the block does not begin with a command.
        """
        found: list[Command] = []
        is_continued = False
        for number, line in enumerate(self.text.splitlines(), self.line + 1):
            if is_continued:
                last = found[-1]
                found[-1] = Command(f"{last.text[:-1].rstrip()} {line.strip()}", last.line)
            elif line.startswith("$ "):
                found.append(Command(line[2:].strip(), number))
            elif not found:
                raise PageError(f"{self.page}:{number}: a console block begins with a command: $ ...")
            else:
                last = found[-1]
                found[-1] = Command(last.text, last.line, (*last.output, line))
            is_continued = found[-1].text.endswith("\\") and not found[-1].output
        if not found:
            raise PageError(f"{self.place}: a console block without a command")
        return found


@dataclass(frozen=True)
class Page:
    """A page of the documents."""

    path: Path
    front_matter: dict[str, Any] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()

    @property
    def name(self) -> str:
        return page_name(self.path)

    @property
    def is_recorded(self) -> bool:
        """Page of measurements that benchmarks wrote; its blocks are not run."""
        return self.name.startswith("docs/results/")

    @property
    def reason_not_runnable(self) -> str:
        """Reason why nothing of the page is run, by its front matter; empty where it gives none."""
        if self.is_recorded:
            return "recorded measurements"
        return str(self.front_matter.get("runnable", "")).removeprefix("no:").strip()

    def blocks_to_run(self) -> list[Block]:
        """Return the blocks that are commands or code and are not excepted."""
        return [
            block
            for block in self.blocks
            if not block.reason_not_run
            and not self.is_recorded
            and (block.language == "console" or (block.language == "python" and not block.title))
        ]


def page_name(path: Path) -> str:
    """Return the page's path within the repository."""
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def all_pages() -> list[Path]:
    """Return the pages whose blocks are checked."""
    named = [REPOSITORY / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")]
    return [*filter(Path.exists, named), *sorted((REPOSITORY / "docs").rglob("*.md"))]


def read_page(path: Path) -> Page:
    """Read the page.

    Raises:
        PageError: an open fence, or a comment on how to run a block that is followed by none.
    """
    name = page_name(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    front_matter, start = _front_matter(lines, name)
    blocks: list[Block] = []
    comments: dict[str, str] = {}
    place = start
    while place < len(lines):
        if comment := _COMMENT.match(lines[place]):
            comments[comment[1]] = comment[2]
        elif fence := _FENCE.match(lines[place]):
            block, place = _read_block(lines, place, fence, comments, name)
            blocks.append(block)
            comments = {}
        elif comments:
            raise PageError(f"{name}:{place}: a comment on how to run a block, but no block below it")
        place += 1
    if comments:
        raise PageError(f"{name}: a comment on how to run a block at the end, but no block")
    return Page(path, front_matter, tuple(blocks))


def _front_matter(lines: list[str], name: str) -> tuple[dict[str, Any], int]:
    """Return the values between two lines `---` at the top, and the number of the lines they take."""
    if not lines or lines[0] != "---":
        return {}, 0
    if "---" not in lines[1:]:
        raise PageError(f"{name}: front matter without an end")
    end = lines.index("---", 1)
    values = yaml.safe_load("\n".join(lines[1:end])) or {}
    runnable = values.get("runnable")
    if runnable is not None and not re.fullmatch(r"no: \S.*", str(runnable)):
        raise PageError(f'{name}: write the reason: runnable: "no: a table"')
    return values, end + 1


def _read_block(
    lines: list[str], place: int, fence: re.Match[str], comments: dict[str, str], name: str
) -> tuple[Block, int]:
    """Return the block whose fence stands in line `place`, and the place of its last line."""
    indent, marks = fence[1], fence[2]
    for end in range(place + 1, len(lines)):
        if lines[end].strip() == marks:
            break
    else:
        raise PageError(f"{name}:{place + 1}: a block without an end")
    text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[place + 1 : end])
    title = _TITLE.search(fence[4])
    exit_code = comments.get("exit", "0")
    if not exit_code.isdecimal():
        raise PageError(f"{name}:{place}: exit: {exit_code} is no exit code")
    for key in ("run", "not run"):
        if comments.get(key) == "":
            raise PageError(f"{name}:{place}: <!-- {key}: --> without a text")
    block = Block(
        page=name,
        line=place + 1,
        language=fence[3],
        title=title[1] if title else "",
        text=text,
        arguments=comments.get("run", ""),
        exit_code=int(exit_code),
        reason_not_run=comments.get("not run", ""),
    )
    return block, end
