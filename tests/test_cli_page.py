"""docs/reference/cli.md is what the parser says."""

from __future__ import annotations

import argparse

import pytest

from support.cli_page import PAGE, examples_and_notes, page
from wanma.cli.parser import build_parser


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the commands that do something: those without actions of their own."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return [leaf for choice in action.choices.values() for leaf in leaves(choice)]
    return [parser]


def test_the_page_is_generated_from_the_parser() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "the command line has changed: PYTHONPATH=tests python -m support.cli_page writes the page anew"
    )


@pytest.mark.parametrize("parser", leaves(build_parser()), ids=lambda parser: parser.prog)
def test_a_command_describes_itself_and_each_argument(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    assert [action.dest for action in parser._actions if not action.help] == []
    assert f" {parser.prog}\n" in page()


@pytest.mark.parametrize("parser", leaves(build_parser()), ids=lambda parser: parser.prog)
def test_a_command_has_an_example(parser: argparse.ArgumentParser) -> None:
    group = parser.prog.rpartition(" ")[0]
    assert f"$ {parser.prog}" in page(), f"an example in the epilog of {parser.prog} or of {group}"


def test_examples_end_where_the_notes_begin() -> None:
    text = "examples:\n  wanma a   # one\n  wanma b \\\n      c\n\nA note.\n"
    assert examples_and_notes(text) == (["$ wanma a   # one", "$ wanma b \\", "    c"], "A note.")
    assert examples_and_notes("A note.\n") == ([], "A note.")


def test_exit_codes_have_a_table() -> None:
    assert "| 130 | The user asked to stop (Ctrl-C); the same command continues the run. |" in page()
