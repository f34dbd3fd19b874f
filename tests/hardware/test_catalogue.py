"""The catalogue knows devices by the names their drivers report, and only by those."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from wanma.hardware.catalogue.lookup import (
    CATALOGUE,
    _normalize_name,
    find_by_driver_name,
    find_by_name,
    require_device_kind,
)
from wanma.job.errors import JobError

PUBLISHED = Path(__file__).parents[3] / "shared" / "tables"


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
    kind = find_by_driver_name(driver_name)
    assert kind.name == name
    assert kind.peak_flops_per_second["bf16"] == pytest.approx(bf16_teraflops * 1e12)


def test_a_v100_has_no_bf16_and_no_tf32() -> None:
    kind = find_by_driver_name("Tesla V100-SXM2-32GB")
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
    assert find_by_driver_name(driver_name) is None


def test_every_kind_is_unique_names_its_source_and_is_ordered_by_precision() -> None:
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)
    order = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4")
    for kind in CATALOGUE:
        rates = [kind.peak_flops_per_second[one] for one in order if one in kind.peak_flops_per_second]
        assert kind.source
        assert set(kind.peak_flops_per_second) <= set(order)
        assert rates[0] > 0
        assert rates == sorted(rates)
        assert 8e9 <= kind.memory_bytes <= 1e12
        assert 2e11 <= kind.bandwidth_bytes_per_second <= 1e13
        assert kind.power_watts is None or 100 <= kind.power_watts <= 1500


def test_every_accelerator_has_a_link_and_the_machine_it_comes_in() -> None:
    for kind in CATALOGUE:
        assert (kind.kind == "cpu") == (kind.link is None) == (kind.server is None) == (kind.cores > 0)
        if kind.link and kind.server:
            assert 1e10 <= kind.link.bandwidth_bytes_per_second <= 1e12
            assert kind.server.devices in (4, 8)
            assert kind.server.source
            if kind.server.power_watts and kind.power_watts:
                assert kind.server.power_watts > kind.server.devices * kind.power_watts


@pytest.mark.parametrize(
    ("link", "gigabytes_per_second", "devices"),
    [
        ("NVLink 2", 150, "V100 SXM2 32 GB"),
        ("NVLink 3", 300, "A100 SXM 80 GB"),
        ("NVLink 4", 450, "H100 SXM"),
        ("NVLink 5", 900, "B200"),
        ("PCIe 4", 31.5, "RTX 4090"),
    ],
)
def test_links_are_counted_in_one_direction(link: str, gigabytes_per_second: float, devices: str) -> None:
    joined = require_device_kind(devices).link
    assert (joined.name, joined.bandwidth_bytes_per_second) == (link, gigabytes_per_second * 1e9)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("h100 sxm", "H100 SXM"),
        ("H100", "H100 SXM"),
        ("A100 40GB", "A100 SXM 40 GB"),
        ("A100-SXM-80GB", "A100 SXM 80 GB"),
        ("a100_sxm", "A100 SXM 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("tpu v5p", "TPU v5p"),
        ("Xeon 8480+", "Xeon Platinum 8480+"),
    ],
)
def test_people_s_names_for_a_device_find_it(said: str, name: str) -> None:
    assert require_device_kind(said).name == name


def test_no_name_means_two_devices() -> None:
    names = [(_normalize_name(name), kind.name) for kind in CATALOGUE for name in (kind.name, *kind.aliases)]
    assert len({plain for plain, _ in names}) == len(set(names))


def test_an_unknown_device_is_refused_with_the_closest_name() -> None:
    with pytest.raises(JobError, match=r"'H100 SMX' .* mean 'H100 SXM'"):
        require_device_kind("H100 SMX")


def test_processors_scale_with_their_cores() -> None:
    xeon = require_device_kind("Xeon Platinum 8480+")
    assert xeon.peak_flops_per_second["bf16"] == pytest.approx(56 * 2.0e9 * 2048)
    two_sockets = xeon.to_processor(112, 10**12)
    assert two_sockets.peak_flops_per_second["fp32"] == pytest.approx(2 * 56 * 2.0e9 * 64)
    assert (two_sockets.power_watts, two_sockets.memory_bytes) == (700, 10**12)
    assert two_sockets.bandwidth_bytes_per_second == pytest.approx(614.4e9)


@pytest.mark.skipif(
    not PUBLISHED.is_dir(), reason="the published measurements are not beside this repository"
)
def test_every_published_measurement_s_device_is_in_the_catalogue() -> None:
    with (PUBLISHED / "published.csv").open(encoding="utf-8") as file:
        columns = {row["gpu"] for row in csv.DictReader(file)}
    # Mixed rows read "RTX-3090x8+RTX-2080x16".
    gpus = {re.sub(r"x\d+$", "", part) for column in columns for part in column.split("+")}
    measured = {
        re.sub(r"_(context_attention|gemm|nccl)_perf$", "", p.stem) for p in (PUBLISHED / "devices").iterdir()
    }
    assert len(gpus) >= 10
    assert len(measured) >= 6
    assert [name for name in sorted(gpus | measured) if find_by_name(name) is None] == []
