"""Records of a run that are elsewhere, fetched before a command reads them."""

from __future__ import annotations

import sys

from wanma.job.run.run_directory import RunDirectory


def warn_about_records(run: RunDirectory, known_problem: str = "") -> str:
    """Bring the records of a submitted run here; if that fails, warn that those here may be old.

    Returns:
        the problem, which is not printed again if it is the known one; empty: there is none.
    """
    if not run.engine.is_file():
        return ""
    from wanma.api.engines.control import fetch_records
    from wanma.job.errors import WanmaError

    try:
        fetch_records(run)
    except WanmaError as error:
        if error.message != known_problem:
            print(f"warning: {error.message}; the records here may be old", file=sys.stderr)
        return error.message
    return ""
