"""The results of a sweep: table and charts."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from support.machines import CHIP
from wanma.bench.collectives.calibration_operators import forecast_seconds
from wanma.bench.collectives.charts import charts
from wanma.bench.collectives.results import CollectiveResults
from wanma.bench.collectives.terminal_tables import fastest_text, results_tables
from wanma.collectives.measurement.bandwidth import CollectiveTiming, fastest_ranges
from wanma.observe.units import bytes_text
from wanma.planner.hardware_model.collective_time import RankGroup, all_gather_seconds, all_reduce_seconds
from wanma.planner.hardware_model.model import HardwareModel, LinkLevel

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
LINK = HardwareModel(CHIP, (LinkLevel(4, 1e-4, 2e9),), start_seconds=0.0)


def sweep(machine: HardwareModel = LINK) -> CollectiveResults:
    """As if measured on a machine with such links; its ring is half as fast."""
    timings = [
        CollectiveTiming(
            "all_reduce",
            name,
            "fp32",
            4,
            1,
            size,
            factor * all_reduce_seconds(machine, RankGroup(4), size),
            8e9,
        )
        for name, factor in (("backend", 1.0), ("ring", 2.0))
        for size in SIZES
    ]
    timings += [
        CollectiveTiming(
            "all_gather", "direct", "fp32", 4, 1, size, all_gather_seconds(machine, RankGroup(4), size), 8e9
        )
        for size in SIZES
    ]
    return CollectiveResults(4, 1, "gloo", "copying", "a machine", tuple(timings), 0)


def shown(one: CollectiveResults) -> str:
    text = io.StringIO()
    Console(file=text, width=140).print(results_tables([one]))
    return text.getvalue()


def test_the_table_has_a_line_for_each_size_with_time_bandwidth_and_share_of_the_limit() -> None:
    lines = shown(sweep()).splitlines()
    assert lines[0] == "4 ranks, gloo: a machine"
    start = lines.index("all_reduce, fp32")
    assert lines[start + 1].split() == ["size", "algorithm", "µs", "forecast", "GB/s", "limit", "share"]
    size, unit, name, backend, rate, limit, share = lines[start + 8].split()
    assert (size, unit, name) == ("16.0", "MiB", "backend")
    seconds = all_reduce_seconds(LINK, RankGroup(4), 1 << 24)
    assert backend == f"{1e6 * seconds:,.0f}"
    assert rate == f"{1.5 * (1 << 24) / seconds / 1e9:.3g}"
    assert (limit, share) == ("8", f"{float(rate) / 8:.0%}")
    name, ring, half, _, _ = lines[start + 9].split()
    assert name == "ring"
    assert float(ring.replace(",", "")) == pytest.approx(2e6 * seconds, rel=1e-3)
    assert float(half) == pytest.approx(float(rate) / 2, rel=0.01)
    assert "all_gather, fp32" in lines
    assert "other processes" not in shown(sweep())
    assert "3 of the measurements" in shown(replace(sweep(), disturbed=3))


def test_a_forecast_stands_after_the_time_of_what_training_runs() -> None:
    timings = sweep().timings
    foreseen = tuple(
        replace(one, forecast_seconds=1.5e-3) if one.algorithm == "backend" else one for one in timings
    )
    lines = shown(replace(sweep(), timings=foreseen)).splitlines()
    start = lines.index("all_reduce, fp32")
    of_backend = [line.split() for line in lines[start + 2 : start + 10] if " backend " in line]
    assert [words[words.index("backend") + 2] for words in of_backend] == ["1,500"] * len(SIZES)
    of_ring = [line.split() for line in lines[start + 2 : start + 10] if " ring " in line]
    assert all(len(words) == 5 for words in of_ring)


def test_a_line_after_the_table_says_for_which_sizes_each_algorithm_is_the_fastest() -> None:
    assert "\nfastest for every size: backend\n" in shown(sweep())
    backend, ring = (
        [one for one in sweep().timings if (one.collective, one.algorithm) == ("all_reduce", name)]
        for name in ("backend", "ring")
    )
    late = [*backend[:2], *(replace(one, seconds=1.0) for one in backend[2:]), *ring]
    text = fastest_text(late)
    assert text == f"fastest: backend up to {bytes_text(SIZES[1])}, ring from {bytes_text(SIZES[2])}"
    once = [*backend[:1], replace(backend[1], seconds=1.0), *backend[2:], *ring]
    sizes = (bytes_text(SIZES[0]), bytes_text(SIZES[1]), bytes_text(SIZES[2]))
    assert fastest_text(once) == "fastest: backend up to {}, ring at {}, backend from {}".format(*sizes)
    assert fastest_text(ring) == ""
    assert [part.algorithm for part in fastest_ranges(once)] == ["backend", "ring", "backend"]


def test_the_table_fits_a_narrow_terminal() -> None:
    text = io.StringIO()
    timings = tuple(replace(one, algorithm="halving_doubling") for one in sweep().timings)
    Console(file=text, width=80).print(results_tables([replace(sweep(), timings=timings)]))
    assert "…" not in text.getvalue()
    assert "halving doubling" in text.getvalue()


def test_forecasts_know_what_training_runs_and_nothing_else() -> None:
    def foreseen(collective: str, algorithm: str, on_cpu: bool = True) -> float | None:
        return forecast_seconds(LINK, collective, algorithm, 4, 1 << 20, on_cpu=on_cpu)

    assert foreseen("all_reduce", "backend") == all_reduce_seconds(LINK, RankGroup(4), 1 << 20)
    assert foreseen("all_gather", "direct") == all_gather_seconds(LINK, RankGroup(4), 1 << 20)
    assert foreseen("all_gather", "direct", on_cpu=False) is None, "there is no such way on a GPU"
    assert foreseen("all_reduce", "ring") is None, "messages were not measured"
    measured = replace(LINK, collective_factors={"send": (1.5, 3.0)})
    for name in ("ring", "tree", "halving_doubling"):
        expected = all_reduce_seconds(measured, RankGroup(4), 1 << 20, f"message_{name}")  # type: ignore[arg-type]
        assert forecast_seconds(measured, "all_reduce", name, 4, 1 << 20, on_cpu=True) == expected
        assert forecast_seconds(measured, "all_reduce", name, 4, 1 << 20, on_cpu=False) is None
    for collective, name in (("all_reduce", "hierarchical"), ("all_gather", "ring")):
        assert forecast_seconds(measured, collective, name, 4, 1 << 20, on_cpu=True) is None
    assert foreseen("broadcast", "backend") is None
    for unknown in (
        None,
        replace(LINK, unknown="nobody says"),
        replace(LINK, links=(LinkLevel(2, 0.0, 1.0),)),
    ):
        assert forecast_seconds(unknown, "all_reduce", "backend", 4, 1 << 20, on_cpu=True) is None


def test_the_page_draws_bandwidth_and_time_of_each_collective_beside_the_limit() -> None:
    drawn = charts(sweep())
    assert [chart.title for chart in drawn] == [
        "all_reduce, fp32: bus bandwidth",
        "all_reduce, fp32: time",
        "all_gather, fp32: bus bandwidth",
        "all_gather, fp32: time",
    ]
    assert [line.name for line in drawn[0].series] == ["backend", "ring", "limit"]
    assert list(drawn[0].series[0].xs) == list(map(float, SIZES))
