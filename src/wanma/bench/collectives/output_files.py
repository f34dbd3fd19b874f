"""Output file of a collective benchmark, as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from wanma.bench.collectives.results import CollectiveResults
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_json


def write_results(results: Sequence[CollectiveResults], folder: Path) -> Path:
    """Write collectives.json into `folder`, which is created if missing, and return its path.

    Raises:
        WanmaError: the folder cannot be written to.
    """
    path = folder / "collectives.json"
    with _writable(folder):
        write_json(path, {"sweeps": [sweep.to_json() for sweep in results]})
    return path


def check_writable(folder: Path) -> None:
    """Raise `WanmaError` if `write_results` would, before anything is measured."""
    with _writable(folder):
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise WanmaError(
            f"cannot write to {folder}: {error.strerror or error}",
            "give another folder with --out DIR",
            EXIT_USAGE,
        ) from error
