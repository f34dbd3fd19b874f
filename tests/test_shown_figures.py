"""Figures that the documents show below a command are those that the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from wanma.cli.main import main

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^ {4}wanma (plan [^\n]*)$|^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SEARCHED = re.compile(r"(plans searched in ).*")
"""The time of looking at plans, which varies."""


def shown() -> list[tuple[str, str]]:
    """(command, output) of each block without a language, whose command is the last one before it."""
    found = []
    for page in ("guides/plan.md", "guides/automatic-plan.md"):
        command = ""
        for match in BLOCK.finditer((DOCS / page).read_text()):
            command = match[1] or command
            if match[2] == "":
                found.append((command, match[3]))
    return found


def plain(text: str) -> str:
    """With single spaces, and without what varies."""
    return " ".join(SEARCHED.sub(r"\1", text).split())


@pytest.mark.parametrize(("command", "output"), shown(), ids=[command for command, _ in shown()])
def test_a_command_prints_what_the_document_shows(
    command: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A document may leave lines out; an ellipsis stands for what it leaves out of one."""
    job = (DOCS / "guides" / "plan.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "llama.toml").write_text(job)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    main(shlex.split(command))
    captured = capsys.readouterr()
    printed, place = plain(captured.out + captured.err), 0
    for line in output.replace("...", "\n").splitlines():
        found = printed.find(plain(line), place)
        assert found >= 0, f"not printed: {line}\n\n{captured.out}{captured.err}"
        place = found + len(plain(line))


def test_the_planners_pages_show_what_commands_print() -> None:
    assert len(shown()) >= 10
