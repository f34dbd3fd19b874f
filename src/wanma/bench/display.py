"""Page and terminal tables of a result, whatever it measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wanma.bench.machine.machine_result import is_machine_result
from wanma.bench.machine_report.machine_blocks import machine_blocks
from wanma.bench.machine_report.page import machine_page
from wanma.bench.machine_report.training_points import training_points
from wanma.bench.presentation.blocks import Block
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_blocks import result_blocks
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.results.result import BenchmarkResult


def page_of(result: BenchmarkResult, directory: ResultDirectory) -> str:
    """Return the page of a result with summaries; that of a machine has the trainings beside its folder."""
    if is_machine_result(result):
        return machine_page(result, training_points(directory, result))
    return result_page(result)


def blocks_of(
    result: BenchmarkResult, directory: ResultDirectory, metrics: Sequence[str] = ()
) -> Iterable[Block]:
    """Return the blocks of a result for a terminal; a machine result shows all its limits."""
    if is_machine_result(result):
        return machine_blocks(result, training_points(directory, result))
    return result_blocks(result, metrics)
