"""The catalogue knows devices by the names their drivers report, and only by those."""

from __future__ import annotations

import pytest

from wanma.hardware.catalogue import CATALOGUE, find_device


@pytest.mark.parametrize(
    ("driver_name", "name", "bf16_teraflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40 GB", 312),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80 GB", 312),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB", 312),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.5),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA H200", "H200 SXM", 989.5),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA L40S", "L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
    ],
)
def test_a_driver_s_name_finds_its_kind(driver_name: str, name: str, bf16_teraflops: float) -> None:
    kind = find_device(driver_name)
    assert kind is not None
    assert kind.name == name
    assert kind.peak_flops_per_second["bf16"] == pytest.approx(bf16_teraflops * 1e12)


def test_a_v100_has_no_bf16_and_no_tf32() -> None:
    kind = find_device("Tesla V100-SXM2-32GB")
    assert kind is not None
    assert set(kind.peak_flops_per_second) == {"fp64", "fp32", "fp16"}
    assert kind.memory_bytes == 32_000_000_000


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20",
        "NVIDIA L40",
        "",
    ],
)
def test_variants_with_other_peaks_are_not_taken_for_the_whole_device(driver_name: str) -> None:
    assert find_device(driver_name) is None


def test_every_kind_is_unique_names_its_source_and_is_ordered_by_precision() -> None:
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)
    for kind in CATALOGUE:
        peak = kind.peak_flops_per_second
        assert kind.source
        assert 0 < peak["fp64"] <= peak["fp32"] <= peak["fp16"]
        assert 8e9 <= kind.memory_bytes <= 3e11
        assert 5e11 <= kind.bandwidth_bytes_per_second <= 1e13
