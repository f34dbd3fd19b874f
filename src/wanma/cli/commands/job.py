"""Command `wanma job`: every key of the job file, with its allowed values and default; upgrade of files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.cli.arguments import set_completer
from wanma.job.errors import JobError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wanma.job.file.schema import TableSchema

_EXAMPLES = """\
examples:
  wanma job                           # all keys with their defaults
  wanma job train.precision           # one key
  wanma job --toml > job.toml         # a commented file to start from
  wanma job --upgrade job.toml --dry-run
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "job",
        help="list the keys of the job file, print a starter file, upgrade older files",
        epilog=_EXAMPLES,
    )
    argument = parser.add_argument(
        "about", metavar="SECTION", nargs="?", help="only this section or key: train, train.precision"
    )
    set_completer(argument, _complete_key_names)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="print a commented job file to start from")
    form.add_argument("--markdown", action="store_true", help="print the page docs/reference/job-file.md")
    form.add_argument("--upgrade", metavar="FILE", nargs="+", help="rename old keys of job files, in place")
    parser.add_argument(
        "--dry-run", action="store_true", help="with --upgrade: print the changes, and write nothing"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.cli.output import print_content
    from wanma.job.file import reference
    from wanma.job.file.renamed_keys import KEYS
    from wanma.job.file.schema import schema_tables

    if arguments.upgrade:
        if arguments.about is not None:  # a file before --upgrade, or behind --upgrade=FILE
            raise JobError(
                f"wanma job: --upgrade does not take '{arguments.about}'",
                "name every file after it: `wanma job --upgrade FILE FILE`",
            )
        return _upgrade(arguments.upgrade, dry_run=arguments.dry_run)
    if arguments.dry_run:
        raise JobError("wanma job: --dry-run needs --upgrade", "run `wanma job --upgrade FILE --dry-run`")
    if arguments.toml:
        print(reference.template_toml(), end="")
    elif arguments.markdown:
        print(reference.reference_markdown(), end="")
    else:
        shown = [table for table in schema_tables() if _matches(table, arguments.about)]
        if (new := KEYS.get(arguments.about)) is not None:
            raise JobError(f"'{arguments.about}' is renamed to '{new}'", f"see `wanma job {new}`")
        if not shown:
            raise JobError(
                "the job file has no "
                f"'{arguments.about}'.{did_you_mean(arguments.about, _complete_key_names(''))}",
                "see all keys with `wanma job`",
            )
        for position, table in enumerate(shown):
            if position:
                print()
            print_content(_keys_table(table, arguments.about))
    return 0


def _upgrade(files: Sequence[str], *, dry_run: bool) -> int:
    """Upgrade each file and check it by loading it; one that cannot be upgraded does not stop the others.

    Raises:
        JobError: files that cannot be upgraded, or are wrong in other ways, too.
    """
    from wanma.job.file.upgrade import upgrade_file

    errors = []
    for file in map(Path, files):
        try:
            changes = upgrade_file(file, dry_run=dry_run)
            for change in changes:
                print(f"{file}:{change.line}: {change.text}")
            if not changes:
                print(f"{file}: no old keys")
            elif not dry_run:
                _check_upgraded(file)
        except JobError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise JobError("\n".join(map(str, errors)))
    return 0


def _check_upgraded(file: Path) -> None:
    from wanma.job.file.loading import load_job

    try:
        load_job(file)
    except JobError as error:
        mistakes = error.message.replace("\n", "\n  ")
        raise JobError(
            f"{file} is upgraded, but by itself is not a valid job:\n  {mistakes}", error.hint
        ) from None


def _matches(table: TableSchema, selected: str | None) -> bool:
    if selected is None or table.path == selected or table.path.startswith(f"{selected}."):
        return True
    return any(key.path == selected for key in table.keys)


def _keys_table(table: TableSchema, selected: str | None) -> RenderableType:
    from rich.table import Table as Grid
    from rich.text import Text

    from wanma.job.file.reference import default_text

    keys = [key for key in table.keys if key.path == selected] or list(table.keys)
    grid = Grid(title=Text.assemble((table.header, "bold cyan"), f"  {table.help}"), title_justify="left")
    grid.box, grid.show_header, grid.pad_edge = None, False, False
    for column in (11, 8, 10):
        grid.add_column(min_width=column)
    grid.add_column(ratio=1)
    for key in keys:
        default = Text(default_text(key), style="dim" if key.default is None else "")
        grid.add_row(
            Text(f"  {key.name}", style="bold"), default, Text(key.allowed, style="green"), Text(key.help)
        )
    return grid


def _complete_key_names(prefix: str, **_: Any) -> list[str]:
    from wanma.job.file.schema import schema_tables

    names = [name for table in schema_tables() for name in (table.path, *(key.path for key in table.keys))]
    return [name for name in names if name.startswith(prefix)]
