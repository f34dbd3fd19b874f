"""A processor is measured at first use, told, and kept for the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from wanma.hardware.discovery import first_use_measurement
from wanma.hardware.discovery.first_use_measurement import with_measured_cpu_peak
from wanma.hardware.discovery.node import discover_node
from wanma.hardware.measurement.cpu_peak import cpu_peak_file, read_cpu_peak
from wanma.job.cluster import Cluster
from wanma.job.plan.plan import Plan
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.preparation.job_planning import peak_flops_per_second


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This machine with no rates of its processor, and nothing kept of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (node,) = discover_node().nodes
    assert node.cpu is not None
    return Cluster((replace(node, devices=(), cpu=replace(node.cpu, peak_flops_per_second={})),))


def test_it_is_measured_once_told_and_kept_and_gives_a_run_its_step_time_and_peak(
    unknown: Cluster, tmp_path: Path
) -> None:
    assert build_hardware_model(unknown).unknown
    told: list[str] = []
    known = with_measured_cpu_peak(unknown, told.append, {})
    (node,) = known.nodes
    assert node.cpu.peak_flops_per_second["fp32"] > 1e8
    assert node.cpu.bandwidth_bytes_per_second > 1e8
    assert "were measured once" in told[0]
    assert str(cpu_peak_file()) in told[0]
    assert build_hardware_model(known).unknown == ""
    assert with_measured_cpu_peak(known, told.append, {}) == known
    assert len(told) == 1
    half = Plan(threads_per_rank=node.cores) if node.cores == 1 else Plan(threads_per_rank=node.cores // 2)
    whole = read_cpu_peak(node.cores)["fp32"]
    assert peak_flops_per_second(half, known) == pytest.approx(whole * half.threads_per_rank / node.cores)


def test_where_it_cannot_be_kept_the_reason_is_told(
    unknown: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any rates do for what cannot be written; the true ones take seconds.
    quick = "from wanma.hardware.measurement import cpu_peak; cpu_peak._measure_precision = lambda _: 1e9; "
    monkeypatch.setattr(first_use_measurement, "_PROGRAM", quick + "cpu_peak.measure_cpu_peak()")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    told: list[str] = []
    assert with_measured_cpu_peak(unknown, told.append, {}) == unknown
    assert "could not be measured: " in told[0]
    assert "cannot write the measured CPU peak" in told[0]


def test_a_switch_turns_it_off(unknown: Cluster) -> None:
    told: list[str] = []
    assert with_measured_cpu_peak(unknown, told.append, {"WANMA_MEASURE_CPU": "0"}) == unknown
    assert told == []


def test_a_processor_of_the_catalogue_is_measured_too_and_one_with_its_memory_unmeasured(
    unknown: Cluster,
) -> None:
    (node,) = unknown.nodes
    catalogued = Cluster((replace(node, cpu=replace(node.cpu, peak_flops_per_second={"fp32": 1.0})),))
    (measured,) = with_measured_cpu_peak(catalogued, lambda _: None, {}).nodes
    assert measured.cpu.peak_flops_per_second["fp32"] > 1e8
    assert measured.cpu.bandwidth_bytes_per_second > 1e8
