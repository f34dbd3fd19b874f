"""Benchmarks of partly frozen models and of offloaded state: what they run, and their pages."""

from pathlib import Path

import pytest
from benchmarks.planner import frozen, offload

from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import build_node_group
from wanma.job.cluster import Cluster
from wanma.job.file.loading import load_job
from wanma.planner.hardware_model.builder import build_hardware_model


@pytest.mark.parametrize("parts", offload.CASES.values(), ids="-".join)
def test_a_job_offloads_the_parts_of_its_case(parts: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(offload.job_text(parts, tmp_path))
    parallel = load_job(path).parallel
    set_parts = [
        part
        for part in ("optimizer", "parameters", "activations")
        if getattr(parallel, f"offload_{part}") == "disk"
    ]
    assert set_parts == list(parts)


def test_the_page_of_offload_states_errors_and_losses() -> None:
    mib = offload.MIB
    runs = {name: offload.Run(90 * mib, 100 * mib, [1.0, 0.5]) for name in offload.CASES}
    runs["optimizer"] = offload.Run(1100 * mib, 1000 * mib, [1.0, 0.25])
    text = offload.report(runs)
    assert "| nothing | 90 | 100 | -10.0% | equal |" in text
    assert "| optimizer | 1,100 | 1,000 | +10.0% | different |" in text


def test_the_page_of_frozen_parameters_has_medians_and_forecasts() -> None:
    ratios = {name: [0.5, 0.6, 0.7, 0.8, 0.9] for name in frozen.CASES}
    node = build_node_group(require_device_kind(frozen.NODE), nics=None)
    hardware = build_hardware_model(Cluster((node,)))
    forecasts = {name: frozen.forecast(case, hardware) for name, case in frozen.CASES.items()}
    text = frozen.report(ratios, forecasts, 5)
    head = forecasts["the head"]
    assert 0 < head < 0.5
    assert f"| the head | 0.70 | 0.60–0.80 | {head:.2f} |" in text
    assert frozen.forecast(frozen.COMPLETE, hardware) == 1
