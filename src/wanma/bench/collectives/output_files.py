"""Output files of a collective benchmark: JSON, CSV and HTML in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wanma.bench.collectives.html_page import sweeps_page
from wanma.bench.collectives.results import Sweep, to_csv
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically, write_json


def write_sweeps(sweeps: Sequence[Sweep], folder: Path) -> list[Path]:
    """Write collectives.json, .csv and .html into `folder`, which is created if missing.

    Returns:
        the paths of the files.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    files = [folder / f"collectives.{kind}" for kind in ("json", "csv", "html")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(files[0], {"sweeps": [sweep.to_json() for sweep in sweeps]})
        write_atomically(files[1], to_csv(sweeps))
        write_atomically(files[2], sweeps_page(sweeps))
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "choose another folder with --out DIR",
            EXIT_USAGE,
        ) from error
    return files


def check_folder(folder: Path) -> None:
    """Raise `WanmaError` if `write_sweeps` would, before anything is measured."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "choose another folder with --out DIR",
            EXIT_USAGE,
        ) from error
