"""Arguments that actions on data share: the data, their format, the cache folder and the processes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import parse_count
from wanma.job.errors import JobError

if TYPE_CHECKING:
    from wanma.data.tools.selection import DataSelection

JOB_SUFFIXES = (".toml", ".yaml", ".yml")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add DATA and the options about its format; `select_data` reads them."""
    parser.add_argument(
        "entries",
        metavar="DATA",
        nargs="+",
        help="files, folders, globs or URLs; or a job file and KEY=VALUE overrides",
    )
    parser.set_defaults(overrides=[])
    parser.add_argument(
        "--format", metavar="NAME", default="", help="read as this format; default: found by content"
    )
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="option of the format, such as unit=sequence; repeatable",
    )
    parser.add_argument(
        "--cache", metavar="DIR", help="folder of indexes; default: data.cache, or the user's cache folder"
    )


def add_process_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--processes",
        metavar="N",
        type=parse_count,
        help="processes that read at once; default: by the size, up to the cores",
    )


def select_data(arguments: argparse.Namespace) -> DataSelection:
    """Return the data that the arguments name, with the tokenizer and sequence length that they give.

    Raises:
        JobError: a missing entry, a wrong job, an unknown format or option.
        WanmaError: storage that cannot be read.
    """
    from dataclasses import replace

    selection = _named_data(arguments)
    return replace(
        selection,
        tokenizer=arguments.tokenizer or selection.tokenizer,
        sequence_length=getattr(arguments, "sequence_length", None) or selection.sequence_length,
    )


def _named_data(arguments: argparse.Namespace) -> DataSelection:
    from wanma.data.tools.selection import FormatChoice, parse_option, select_entries, select_job_data

    choice = FormatChoice(arguments.format, dict(map(parse_option, arguments.option)))
    entries = [*arguments.entries, *arguments.overrides]
    jobs = [entry for entry in entries if entry.endswith(JOB_SUFFIXES) and "://" not in entry]
    if not jobs:
        return select_entries(entries, choice, arguments.cache)
    others = [entry for entry in entries[1:] if "=" not in entry]
    if jobs[0] != entries[0] or others:
        raise JobError(
            f"{jobs[0]} is a job, and '{others[0] if others else entries[0]}' stands beside it",
            "name one job and its overrides, or files of data",
        )
    from wanma.data.data_kinds import with_data_kinds
    from wanma.job.file.loading import load_job

    job = with_data_kinds(load_job(Path(entries[0]), entries[1:]))
    return select_job_data(job.data, choice, arguments.cache)


@contextmanager
def shown_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback for (bytes done, bytes in all) that shows progress on standard error.

    Args:
        label: work that goes on, such as 'reading'.
    """
    import sys

    from wanma.observe.console.dataset_progress import show_dataset_progress

    with show_dataset_progress(False, sys.stderr, label=label) as progress:
        yield progress
