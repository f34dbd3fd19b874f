"""Collectives of a machine result: tables and charts by size and algorithm."""

from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from wanma.bench.machine_report.collectives import charts, fastest_text, timings_block
from wanma.bench.presentation.blocks import terminal
from wanma.collectives.measurement.bandwidth import CollectiveTiming
from wanma.observe.units import bytes_text

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)


def timings(collective: str, algorithm: str, factor: float = 1.0) -> list[CollectiveTiming]:
    return [
        CollectiveTiming(collective, algorithm, 4, size, factor * (1e-4 + size / 2e9), 8e9) for size in SIZES
    ]


BACKEND, RING = timings("all_reduce", "backend"), timings("all_reduce", "ring", 2.0)


def shown(rows: list[CollectiveTiming], width: int = 80) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=width).print(terminal([timings_block(rows[0].collective, rows)]))
    return text.getvalue().splitlines()[1:]


def test_the_table_has_a_line_for_each_size_with_time_bandwidth_and_share_of_the_limit() -> None:
    lines = shown([*BACKEND, *RING])
    assert lines[0].split() == ["size", "algorithm", "µs", "GB/s", "limit", "share"]
    rate = 1.5 * SIZES[-1] / BACKEND[-1].seconds / 1e9
    last = f"16.0 MiB backend {1e6 * BACKEND[-1].seconds:,.0f} {rate:.3g} 8 {rate / 8:.0%}"
    assert lines[7].split() == last.split()
    assert lines[8].split()[:2] == ["ring", f"{1e6 * RING[-1].seconds:,.0f}"]
    without = [replace(one, link_bytes_per_second=math.nan) for one in BACKEND]
    assert shown(without)[1].split()[-2:] == ["–", "–"]


def test_the_table_fits_a_narrow_terminal() -> None:
    text = "\n".join(shown([replace(one, algorithm="halving_doubling") for one in RING]))
    assert "…" not in text
    assert "halving doubling" in text


def test_a_line_after_the_table_says_for_which_sizes_each_algorithm_is_the_fastest() -> None:
    assert fastest_text([*BACKEND, *RING]) == "fastest for every size: backend"
    backend, ring = BACKEND, RING
    late = [*backend[:2], *(replace(one, seconds=1.0) for one in backend[2:]), *ring]
    text = fastest_text(late)
    assert text == f"fastest: backend up to {bytes_text(SIZES[1])}, ring from {bytes_text(SIZES[2])}"
    once = [*backend[:1], replace(backend[1], seconds=1.0), *backend[2:], *ring]
    sizes = (bytes_text(SIZES[0]), bytes_text(SIZES[1]), bytes_text(SIZES[2]))
    assert fastest_text(once) == "fastest: backend up to {}, ring at {}, backend from {}".format(*sizes)
    assert fastest_text(ring) == ""


def test_the_page_draws_bandwidth_and_time_of_each_collective_beside_the_limit() -> None:
    drawn = charts([*BACKEND, *RING, *timings("all_gather", "direct")])
    names = ("all_reduce: bus bandwidth", "all_reduce: time", "all_gather: bus bandwidth", "all_gather: time")
    assert tuple(chart.title for chart in drawn) == names
    assert [line.name for line in drawn[0].series] == ["backend", "ring", "limit"]
    assert list(drawn[0].series[0].xs) == list(map(float, SIZES))
