"""Suite of commands, as the command line describes it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from wanma.bench.programs.contender import Patterns
from wanma.bench.programs.redaction import REDACTED, redact_command
from wanma.bench.runner import Rule, duration_seconds
from wanma.bench.suites.suite_file import ContenderTable, Suite, SuiteFile, make_suite
from wanma.job.errors import EXIT_USAGE, WanmaError

MAX_TITLE_NAMES = 2
"""Largest number of commands that the title of a result names."""


def suite_of_commands(
    commands: Sequence[Sequence[str] | str],
    *,
    patterns: Mapping[str, str | None],
    figures: Sequence[str] = (),
    target: str | None = None,
    turns: str | None = None,
) -> tuple[Suite, Rule]:
    """Return suite and rule of commands that take turns.

    Args:
        commands: each a list of words, or one text as a shell splits it.
        figures: patterns of figures as NAME=REGEX.
        turns: duration of turns of commands that live at once, such as "1s".

    Raises:
        WanmaError: there is no command, or a pattern is wrong.
    """
    words = [shlex.split(command) if isinstance(command, str) else list(command) for command in commands]
    if not words or not all(words):
        raise WanmaError(
            "there is no command to measure",
            "write it after --, as in `wanma bench run -- python train.py`, or as --command TEXT",
            EXIT_USAGE,
        )
    named: dict[str, str] = {}
    for text in figures:
        name, equals, pattern = text.partition("=")
        if not equals or not name:
            raise WanmaError(
                f"--figure {text}: expected NAME=REGEX", "for example 'accuracy=acc: ([0-9.]+)'", EXIT_USAGE
            )
        named[name] = pattern
    names = _names(words)
    title = " and ".join(names)
    if len(names) > MAX_TITLE_NAMES:
        title = f"{names[0]} and {len(names) - 1} others"
    table = Patterns(**{name: text for name, text in patterns.items() if text}, figures=named)
    file = SuiteFile(
        title=title,
        contenders=[
            ContenderTable(name=name, command=one, patterns=table)
            for name, one in zip(names, words, strict=True)
        ],
        target=target,
        rule=Rule(turn_seconds=0.0 if turns is None else duration_seconds(turns)),
    )
    return make_suite("commands", file, Path()), file.rule


def _names(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return short names: the command line, in one line and without secrets, numbered where two are equal."""
    texts = [" ".join(_shell_text(redact_command(command)).split())[:60] for command in commands]
    return [text if texts.count(text) == 1 else f"{text} #{number}" for number, text in enumerate(texts, 1)]


def _shell_text(words: Sequence[str]) -> str:
    """Return words as a shell takes them, those that end redacted without quotes."""
    return " ".join(
        word if word.endswith(REDACTED) and " " not in word else shlex.quote(word) for word in words
    )
