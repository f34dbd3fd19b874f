"""Output files of a collective benchmark: JSON, CSV and HTML in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wanma.bench.collectives.html_page import results_page
from wanma.bench.collectives.results import CollectiveResults, to_csv
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically, write_json


def write_results(results: Sequence[CollectiveResults], folder: Path) -> list[Path]:
    """Write collectives.json, .csv and .html into `folder`, which is created if missing.

    Returns:
        the paths of the files.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    files = [folder / f"collectives.{kind}" for kind in ("json", "csv", "html")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(files[0], {"sweeps": [sweep.to_json() for sweep in results]})
        write_atomically(files[1], to_csv(results))
        write_atomically(files[2], results_page(results))
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "give another folder with --out DIR",
            EXIT_USAGE,
        ) from error
    return files


def check_writable(folder: Path) -> None:
    """Raise `WanmaError` if `write_results` would, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "give another folder with --out DIR",
            EXIT_USAGE,
        ) from error
