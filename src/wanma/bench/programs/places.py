"""Places that the words of a contender stand for, filled in when it is executed.

A suite, and a result, have the words: folders and interpreters differ between clones and machines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.bench.programs.contender import Contender

SUITE, PYTHON, ENVIRONMENTS, TREES = "suite", "python", "environments", "trees"
"""Words: folder of the suite, interpreter of the contender, folder of the Python environments, files of
commits. A text has them in braces."""


@dataclass(frozen=True)
class Places:
    """Folders of this machine that belong to a suite."""

    suite: Path
    """Folder of the suite file."""
    environments: Path
    """Folder of the Python environments."""
    trees: Path = Path()
    """Folder of the files of a gate's commits, while it runs."""


def word(name: str) -> str:
    """Return a word as a text has it."""
    return "{" + name + "}"


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with the values that its words stand for."""
    for name, value in values.items():
        text = text.replace(word(name), value)
    return text


def with_words(text: str, values: Mapping[str, str]) -> str:
    """Return a text with words in place of the values that they stand for, the longest value first."""
    for name in sorted(values, key=lambda one: len(values[one]), reverse=True):
        text = text.replace(values[name], word(name))
    return text


def place_contender(contender: Contender, places: Places) -> Contender:
    """Return a contender as it runs on this machine: all its words are filled in.

    Files of commits are filled into the working directory and the variables, which alone have them: a command
    may be a program with such a word in a text of its own.
    """
    folders = {SUITE: str(places.suite.resolve()), ENVIRONMENTS: str(places.environments.absolute())}
    environment = contender.python_environment
    if environment is not None:
        environment = replace(
            environment,
            folder=filled(environment.folder, folders),
            requirements=filled(environment.requirements, folders),
        )
    words = {
        SUITE: folders[SUITE],
        PYTHON: sys.executable if environment is None else str(environment.python),
    }
    commits = {**words, TREES: str(places.trees.resolve())}
    return replace(
        contender,
        settings={key: filled(value, words) for key, value in contender.settings.items()},
        command=tuple(filled(one, words) for one in contender.command),
        environment={name: filled(value, commits) for name, value in contender.environment.items()},
        folder=filled(contender.folder, commits),
        python_environment=environment,
    )
