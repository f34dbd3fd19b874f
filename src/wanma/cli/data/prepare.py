"""Action `wanma data prepare`: the data of a job, made ready before a run."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_job_arguments

_EXAMPLES = """\
examples:
  wanma data prepare job.toml data.cache=/shared/cache

Of nodes with a common data.cache one prepares, with all its cores; the others wait, and go on if it dies.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare", help="make the data of a job ready, as the start of a run does", epilog=_EXAMPLES
    )
    add_job_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import time

    from wanma.cli.data.arguments import shown_progress
    from wanma.data.data_kinds import with_data_kinds
    from wanma.data.index.records import cache_folder
    from wanma.data.opening import prepare_job_data
    from wanma.job.file.loading import load_job
    from wanma.observe.units import duration_text

    job = with_data_kinds(load_job(arguments.job, arguments.overrides))
    if job.data.has_factory:
        print(f"nothing to prepare: {job.data.factory_text} is a program that each rank runs")
        return 0
    start = time.monotonic()
    with shown_progress("preparing") as progress:
        prepare_job_data(job.data, progress)
    seconds = duration_text(time.monotonic() - start)
    print(f"ready in {seconds}; cache: {cache_folder(job.data.cache)}")
    return 0
