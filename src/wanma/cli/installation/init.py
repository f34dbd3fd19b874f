"""Command `wanma init`: list of the shipped examples, and a copy of one to start from."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.cli.arguments import set_completer

if TYPE_CHECKING:
    from wanma.job.examples import Example

_EXAMPLES = """\
examples:
  wanma init                   # all examples
  wanma init gpt               # write gpt.toml into this folder

An existing file is never changed.
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "init", help="write an example to start from: a job file or a script", epilog=_EXAMPLES
    )
    name = parser.add_argument("name", metavar="NAME", nargs="?", help="example; default: list all")
    set_completer(name, _complete_examples)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.job.examples import find_example, list_examples, write_example

    examples = list_examples()
    if arguments.name is None:
        _print_list(examples)
        return 0
    print(f"wrote {write_example(arguments.name, Path(), examples)}")
    example = find_example(arguments.name, examples)
    if example.needs_data:
        print("its first lines say which data to download")
    for other in _required(example, examples):
        print(f"needs: wanma init {other.name}")
    for command in example.commands[: 1 + len(_required(example, examples))]:
        print(f"next:  {_runnable(command)}")
    return 0


def _print_list(examples: list[Example]) -> None:
    from rich.table import Table
    from rich.text import Text

    from wanma.cli.output import print_content

    grid = Table(box=None, show_header=False, pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for title, suffix in (("job files", ".toml"), ("scripts", ".py")):
        grid.add_row(Text(title, style="bold"), "")
        for example in examples:
            if example.file.suffix == suffix:
                note = " (needs a download)" if example.needs_data else ""
                grid.add_row(Text(f"  {example.name}", style="cyan"), Text(example.summary + note))
    print_content(grid)
    print("\nwrite one into this folder: wanma init NAME")


def _required(example: Example, examples: list[Example]) -> list[Example]:
    """Return the other examples that the first command of an example runs."""
    words = example.commands[0].split()
    return [other for other in examples if other.file.name in words and other is not example]


def _runnable(command: str) -> str:
    """Return a command whose `python` is the one that has wanma, which of pipx and uv is not the shell's."""
    program, _, rest = command.partition(" ")
    found = shutil.which(program)
    if program != "python" or (found and Path(found).parent == Path(sys.executable).parent):
        return command
    return f"{shlex.quote(sys.executable)} {rest}"


def _complete_examples(prefix: str, **_: Any) -> list[str]:
    from wanma.job.examples import list_examples

    return [example.name for example in list_examples() if example.name.startswith(prefix)]
