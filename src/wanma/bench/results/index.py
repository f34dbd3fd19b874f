"""SQLite index of all results below a root folder.

The folders are the truth and the index a cache of them: every opening brings it up to date, and one that is
damaged, or of another version, is built again.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from wanma.bench.results.directory import ResultDirectory, list_result_directories
from wanma.bench.results.hardware_identity import content_key, hardware_key
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.statistics.estimates import Estimate
from wanma.job.errors import EXIT_USAGE, WanmaError

INDEX_NAME = "index.sqlite"
VERSION = 1
"""Version of the tables, in `PRAGMA user_version`."""
MAX_NAMED = 5
"""Largest number of candidates that an error names."""

_TABLES = f"""
CREATE TABLE results (
    id TEXT PRIMARY KEY, stamp TEXT NOT NULL, name TEXT NOT NULL, title TEXT NOT NULL, created TEXT NOT NULL,
    ended TEXT NOT NULL, suite TEXT NOT NULL, suite_hash TEXT NOT NULL, hardware TEXT NOT NULL,
    "commit" TEXT NOT NULL
);
CREATE TABLE figures (
    id TEXT NOT NULL REFERENCES results (id) ON DELETE CASCADE, contender TEXT NOT NULL,
    settings TEXT NOT NULL, metric TEXT NOT NULL, median REAL, low REAL, high REAL, count INTEGER,
    PRIMARY KEY (id, contender, metric)
);
CREATE TABLE problems (id TEXT PRIMARY KEY, stamp TEXT NOT NULL, text TEXT NOT NULL);
PRAGMA user_version = {VERSION};
"""


@dataclass(frozen=True)
class IndexedResult:
    """Row of the index: a result without its figures."""

    id: str
    name: str
    title: str
    created: str
    ended: str
    """Empty: interrupted, or running."""
    suite: str
    suite_hash: str
    hardware: str
    """Key of the hardware, as of `hardware_key`."""
    commit: str


@dataclass(frozen=True)
class IndexedFigure:
    """Estimate of one metric of one contender in one result."""

    id: str
    created: str
    hardware: str
    commit: str
    contender: str
    settings: str
    """Key of the contender's settings."""
    metric: str
    estimate: Estimate
    suite: str = ""
    """Name of the suite."""
    suite_hash: str = ""


class ResultIndex:
    """Index of the results below `root`; a context manager.

    Where the root cannot be written, the index is built in memory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._database = _open(root)
        self.update()

    def __enter__(self) -> ResultIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def update(self) -> None:
        """Bring the index up to date with the folders."""
        try:
            self._update()
        except sqlite3.DatabaseError:
            self.rebuild()

    def rebuild(self) -> None:
        """Build the index again from the folders."""
        self._database.close()
        with contextlib.suppress(OSError):
            (self.root / INDEX_NAME).unlink(missing_ok=True)
        self._database = _open(self.root)
        self._update()

    def results(self) -> list[IndexedResult]:
        """Return all results, oldest first."""
        columns = 'id, name, title, created, ended, suite, suite_hash, hardware, "commit"'
        rows = self._database.execute(f"SELECT {columns} FROM results ORDER BY created, id")
        return [IndexedResult(*row) for row in rows]

    def problems(self) -> list[str]:
        """Return the messages of results that cannot be read."""
        return [text for (text,) in self._database.execute("SELECT text FROM problems ORDER BY id")]

    def find(self, text: str) -> ResultDirectory:
        """Return the result with this id, with an id that alone begins so, or in this folder.

        Raises:
            WanmaError: there is none, or more than one.
        """
        if text and (Path(text) / "result.json").is_file():
            return ResultDirectory(Path(text))
        names = [name for (name,) in self._database.execute("SELECT id FROM results ORDER BY id")]
        names += [name for (name,) in self._database.execute("SELECT id FROM problems ORDER BY id")]
        matches = [name for name in names if name == text] or [
            name for name in names if name.startswith(text)
        ]
        if len(matches) == 1:
            return ResultDirectory(self.root / matches[0])
        if matches:
            shown = ", ".join(matches[:MAX_NAMED]) + (", …" if len(matches) > MAX_NAMED else "")
            raise WanmaError(
                f"'{text}' begins the ids of {len(matches)} results: {shown}",
                "give more of the id",
                EXIT_USAGE,
            )
        raise WanmaError(
            f"there is no result '{text}' in {self.root}",
            f"the newest is {names[-1]}"
            if names
            else "run a benchmark first, or give the folder of its results",
            EXIT_USAGE,
        )

    def figures(
        self, contender: str, metric: str, hardware: str | None = None, suite: str | None = None
    ) -> list[IndexedFigure]:
        """Return the estimates of a metric of a contender, oldest first.

        Args:
            contender: name of the contender.
            metric: name of the metric.
            hardware: key of the hardware; None: any.
            suite: name of the suite; None: any.
        """
        rows = self._database.execute(
            'SELECT id, created, hardware, "commit", contender, settings, metric, suite, suite_hash, '
            "median, low, high, count FROM figures JOIN results USING (id) "
            "WHERE contender = ? AND metric = ? AND (? IS NULL OR hardware = ?) "
            "AND (? IS NULL OR suite = ?) ORDER BY created, id",
            (contender, metric, hardware, hardware, suite, suite),
        )
        return [
            IndexedFigure(
                name, created, key, commit, contender, settings, metric, Estimate(*numbers), suite, digest
            )
            for name, created, key, commit, contender, settings, metric, suite, digest, *numbers in rows
        ]

    def contenders(self, suite: str | None = None) -> list[str]:
        """Return the names of all contenders with figures; of one suite, or of all."""
        return self._names("contender", suite, None)

    def metrics(self, suite: str | None = None, contender: str | None = None) -> list[str]:
        """Return the names of all metrics that a result has; of one suite and contender, or of all."""
        return self._names("metric", suite, contender)

    def _names(self, column: str, suite: str | None, contender: str | None) -> list[str]:
        rows = self._database.execute(
            f"SELECT DISTINCT {column} FROM figures JOIN results USING (id) "
            "WHERE (? IS NULL OR suite = ?) AND (? IS NULL OR contender = ?) ORDER BY 1",
            (suite, suite, contender, contender),
        )
        return [name for (name,) in rows]

    def _update(self) -> None:
        known = dict(self._database.execute("SELECT id, stamp FROM results"))
        known.update(self._database.execute("SELECT id, stamp FROM problems"))
        present = {directory.id: directory for directory in list_result_directories(self.root)}
        stamps = {name: _stamp(directory) for name, directory in present.items()}
        with self._database:
            for name in known:
                if stamps.get(name) != known[name]:
                    for table in ("figures", "results", "problems"):
                        self._database.execute(f"DELETE FROM {table} WHERE id = ?", (name,))
            for name, directory in present.items():
                if known.get(name) != stamps[name]:
                    self._add(directory, stamps[name])

    def _add(self, directory: ResultDirectory, stamp: str) -> None:
        try:
            result = directory.read(with_measurements=False)
            rows = list(_figure_rows(directory.id, result))
            hardware = hardware_key(result.hardware)
        except (WanmaError, ValueError) as error:
            text = error.message if isinstance(error, WanmaError) else f"{directory.result}: {error}"
            self._database.execute("INSERT INTO problems VALUES (?, ?, ?)", (directory.id, stamp, text))
            return
        self._database.execute(
            "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                directory.id,
                stamp,
                result.name,
                result.title,
                result.created,
                result.ended,
                result.suite.name,
                result.suite.hash,
                hardware,
                str(result.code.get("commit") or ""),
            ),
        )
        self._database.executemany("INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)


def _figure_rows(name: str, result: BenchmarkResult) -> Iterator[tuple[str | float | int, ...]]:
    for contender in result.contenders:
        settings = content_key([contender.settings, contender.command if contender.kind == "command" else []])
        for metric, estimate in result.summaries.get(contender.name, {}).items():
            numbers = (estimate.median, estimate.low, estimate.high, estimate.count)
            yield (name, contender.name, settings, metric, *numbers)


def _stamp(directory: ResultDirectory) -> str:
    status = directory.result.stat()
    return f"{status.st_mtime_ns} {status.st_size}"


def _open(root: Path) -> sqlite3.Connection:
    """Open the index of `root`, with its tables; in memory where `root` cannot be written."""
    file = root / INDEX_NAME
    for attempt in range(2):
        try:
            return _prepared(sqlite3.connect(file))
        except sqlite3.OperationalError:
            break  # the folder is missing or read-only
        except sqlite3.DatabaseError:
            if attempt == 0:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
    return _prepared(sqlite3.connect(":memory:"))


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    """Create the tables where they are missing or of another version.

    Raises:
        sqlite3.Error: the file cannot be written, or is no database.
    """
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            for table in ("figures", "results", "problems"):
                database.execute(f"DROP TABLE IF EXISTS {table}")
            database.executescript(_TABLES)
        database.execute("UPDATE results SET id = id WHERE 0")  # fails where the file is read-only
    except sqlite3.Error:
        database.close()
        raise
    return database
