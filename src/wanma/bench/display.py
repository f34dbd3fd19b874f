"""Page and tables of a result, whatever it measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wanma.bench.machine.machine_result import is_machine_result
from wanma.bench.machine_report.page import machine_page
from wanma.bench.machine_report.tables import machine_tables
from wanma.bench.machine_report.training_points import training_points
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.terminal import result_tables
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.result import BenchmarkResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType


def page_of(result: BenchmarkResult, directory: ResultDirectory) -> str:
    """Return the page of a result.

    Args:
        result: a result with summaries.
        directory: its folder; trainings in those beside it are shown with a machine result.
    """
    if is_machine_result(result):
        return machine_page(result, training_points(directory, result))
    return result_page(result)


def tables_of(
    result: BenchmarkResult, directory: ResultDirectory, metrics: Sequence[str] = ()
) -> RenderableType:
    """Return the terminal tables of a result.

    Args:
        result: a result with summaries.
        directory: its folder.
        metrics: names of the metrics to show; a machine result shows all its limits.
    """
    if is_machine_result(result):
        return machine_tables(result, training_points(directory, result))
    return result_tables(result, metrics)
