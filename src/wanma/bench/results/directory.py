"""Folder of one result: `result.json`, `measurements/NNNN.json`, `page.html`.

Each measurement is written as soon as it ends, so a benchmark that was killed goes on with the next.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wanma.bench.measurements.measurement import Measurement
from wanma.bench.results.result import BenchmarkResult
from wanma.engines.code.listing import BENCHMARK_RESULTS_FILE
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import write_atomically

Content = TypeVar("Content")

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""
MAX_NAMED = 5
"""Largest number of candidates that an error names."""


@dataclass(frozen=True)
class ResultDirectory:
    """Paths of the files of one result, and their reading and writing."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def measurements(self) -> Path:
        """Folder with one file for each measurement, numbered from 0 in the order of their execution."""
        return self.path / "measurements"

    @property
    def page(self) -> Path:
        return self.path / "page.html"

    def write_result(self, result: BenchmarkResult) -> None:
        """Write everything but the measurements."""
        self._write(self.result, json.dumps(result.to_json(), indent=2, ensure_ascii=False) + "\n")

    def add_measurement(self, measurement: Measurement) -> Path:
        """Write a measurement after those that are there, and return its file."""
        numbers = [int(path.stem) for path in self._measurement_files()]
        path = self.measurements / f"{max(numbers, default=-1) + 1:04d}.json"
        return self._write(path, json.dumps(measurement.to_json(), ensure_ascii=False) + "\n")

    def write_page(self, html: str) -> Path:
        """Write the page and return its path."""
        return self._write(self.page, html)

    def read_measurements(self) -> tuple[Measurement, ...]:
        """Read all measurements in the order of their execution.

        Raises:
            WanmaError: a file is damaged.
        """
        return tuple(_read(path, Measurement.from_json) for path in self._measurement_files())

    def read(self, with_measurements: bool = True) -> BenchmarkResult:
        """Read the result.

        Args:
            with_measurements: False leaves `measurements` empty, which is much faster.

        Raises:
            WanmaError: there is no result here, it is damaged, or its schema is newer than this version.
        """
        measurements = self.read_measurements() if with_measurements else ()
        return _read(self.result, lambda content: BenchmarkResult.from_json(content, measurements))

    def _write(self, path: Path, text: str) -> Path:
        try:
            self.measurements.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise self.unwritable(error) from error
        return path

    def _measurement_files(self) -> list[Path]:
        paths = self.measurements.glob("*.json")
        return sorted((path for path in paths if path.stem.isdigit()), key=lambda path: int(path.stem))

    def unwritable(self, error: OSError) -> WanmaError:
        """Return the error of a folder that cannot be written to."""
        remedy = "free space there, or " if error.errno in DISK_FULL_ERRNOS else ""
        return WanmaError(
            f"cannot write to {self.path}: {error.strerror or error}",
            f"{remedy}give another folder for results: --results DIR",
            EXIT_USAGE,
        )


def create_result_directory(root: Path, name: str, created: str) -> ResultDirectory:
    """Create a folder for a new result.

    Args:
        created: start of the benchmark in ISO 8601.

    Returns:
        The folder, named by date, time and `name`: `20261122-101530-gpt`; `-2` and so on follow if it exists.

    Raises:
        WanmaError: the folder cannot be created.
    """
    clock = re.sub(r"\D", "", created[:19])
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "benchmark"
    base = f"{clock[:8]}-{clock[8:]}-{slug}"
    for number in range(1, 1000):
        directory = ResultDirectory(root / (base if number == 1 else f"{base}-{number}"))
        try:
            directory.path.mkdir(parents=True)
            (root / BENCHMARK_RESULTS_FILE).touch()
        except FileExistsError:
            continue
        except OSError as error:
            raise directory.unwritable(error) from error
        return directory
    raise WanmaError(f"{root} has 999 results named {base}", "give the benchmark another name", EXIT_USAGE)


def list_result_directories(root: Path) -> Iterator[ResultDirectory]:
    """Yield the results below `root`, oldest first by name."""
    if root.is_dir():
        for path in sorted(root.iterdir()):
            if (path / "result.json").is_file():
                yield ResultDirectory(path)


def read_results(
    root: Path, problems: list[str] | None = None
) -> Iterator[tuple[ResultDirectory, BenchmarkResult]]:
    """Yield the results below `root` without their measurements, oldest first by name.

    Args:
        problems: receives the messages of results that are damaged or of a newer version; they are left out.
    """
    for directory in list_result_directories(root):
        try:
            result = directory.read(with_measurements=False)
        except WanmaError as error:
            if problems is not None:
                problems.append(error.message)
            continue
        yield directory, result


def find_result(root: Path, text: str) -> ResultDirectory:
    """Return the result with this id, with an id that alone begins so, or in this folder.

    Raises:
        WanmaError: there is none, or more than one.
    """
    if text and (Path(text) / "result.json").is_file():
        return ResultDirectory(Path(text))
    names = [directory.id for directory in list_result_directories(root)]
    matches = [name for name in names if name == text] or [name for name in names if name.startswith(text)]
    if len(matches) == 1:
        return ResultDirectory(root / matches[0])
    if matches:
        shown = ", ".join(matches[:MAX_NAMED]) + (", …" if len(matches) > MAX_NAMED else "")
        raise WanmaError(
            f"'{text}' begins the ids of {len(matches)} results: {shown}", "give more of the id", EXIT_USAGE
        )
    raise WanmaError(
        f"there is no result '{text}' in {root}",
        f"the newest is {names[-1]}" if names else "run a benchmark first, or give the folder of its results",
        EXIT_USAGE,
    )


def _read(path: Path, build: Callable[[dict[str, Any]], Content]) -> Content:
    """Return `build` of the JSON in `path`."""
    try:
        return build(json.loads(path.read_text("utf-8")))
    except WanmaError as error:
        raise WanmaError(f"{path}: {error.message}", error.hint, error.exit_code) from error
    except FileNotFoundError as error:
        raise WanmaError(
            f"{path.parent} has no {path.name}", "give the folder of a result", EXIT_USAGE
        ) from error
    except OSError as error:
        raise WanmaError(f"cannot read {path}: {error.strerror or error}", exit_code=EXIT_USAGE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WanmaError(
            f"{path} is damaged: {type(error).__name__}: {error}",
            "restore the file, or remove its folder" if path.name == "result.json" else "remove the file",
        ) from error
