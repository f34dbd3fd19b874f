"""From clusters to machines: what links and devices attain, what is assumed, what stays unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planner.step_times import decoder_step_time
from hypothesis import given, settings
from hypothesis import strategies as st

from wanma.hardware.catalogue.efficiency import DEVICE_EFFICIENCIES
from wanma.hardware.catalogue.lookup import CATALOGUE, require_device_kind
from wanma.hardware.cluster_file.node_builder import Nics, build_node_group
from wanma.hardware.cluster_file.reader import load_cluster_file, read_cluster
from wanma.job.cluster import Cluster, Device, InterconnectLevel, NodeGroup
from wanma.job.plan.plan import Plan
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.hardware_model.builder import (
    DISK_BYTES_PER_SECOND,
    HOST_LINK_SHARE,
    build_hardware_model,
    nearest_catalogue_device,
)
from wanma.planner.hardware_model.calibration import Calibration, CorrectionFactors, DeviceCalibration
from wanma.planner.hardware_model.collective_time import RankGroup, all_to_all_seconds, leaves_innermost_level
from wanma.planner.hardware_model.efficiency_curves import GENERATION_CURVES
from wanma.planner.hardware_model.model import HardwareModel, HostModel, LinkLevel

MODEL = DecoderConfig(8, 2048, 16, 16, 8192, 32000)
ACCELERATORS = [kind.name for kind in CATALOGUE if kind.kind != "cpu"]
PROCESSORS = [kind.name for kind in CATALOGUE if kind.kind == "cpu"]


def step_seconds(machine: HardwareModel, **plan: object) -> float:
    precision = next(one for one in ("bf16", "fp16", "fp32") if one in machine.chip.products)
    return decoder_step_time(MODEL, 1024, Plan(precision=precision, **plan), 32, machine).seconds  # type: ignore[arg-type]


def described(tmp_path: Path, text: str) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return load_cluster_file(path)


def test_a_dgx_h100_attains_what_was_measured_on_one() -> None:
    machine = build_hardware_model(read_cluster("4x8 H100 SXM, 8x400G"))
    inside, between = machine.links
    assert (inside.devices, between.devices) == (8, 32)
    assert inside.bandwidth_bytes_per_second == pytest.approx(351e9)
    assert between.bandwidth_bytes_per_second == pytest.approx(0.9 * 50e9)
    assert (inside.latency_seconds, between.latency_seconds) == pytest.approx((1e-6, 8.1e-6))
    assert (machine.chip.multiprocessors, machine.chip.sustained) == (132, 0.81)
    assert machine.chip.products["bf16"].attainable == 0.82
    assert (machine.doubt, machine.assumed, machine.unknown) == (0.0, (), "")


def test_trays_of_one_nvlink_domain_are_one_level() -> None:
    machine = build_hardware_model(read_cluster("36x4 GB200, 4x400G"))
    assert [link.devices for link in machine.links] == [72, 144]
    part = build_hardware_model(read_cluster("2x4 GB200, 4x400G"))
    assert [link.devices for link in part.links] == [8]
    assert part.links[0].bandwidth_bytes_per_second == pytest.approx(658e9, rel=1e-3)


@pytest.mark.parametrize(
    ("count", "each", "told"),
    [
        (64, 16, "on 4 domains of NVLink 5 (up to 18 nodes), 16 in each"),
        (256, 16, "on 16 domains of NVLink 5 (up to 18 nodes), 16 in each"),
        (36, 18, "on 2 domains of NVLink 5 (up to 18 nodes), 18 in each"),
        (67, 18, "on 3 domains of NVLink 5 (up to 18 nodes), 18 in each, and 13 in another"),
    ],
)
def test_machines_lie_evenly_on_the_fewest_racks_and_the_placement_is_told(
    count: int, each: int, told: str
) -> None:
    machine = build_hardware_model(read_cluster(f"{count}x4 GB200, 4x400G"))
    assert [link.devices for link in machine.links] == [4 * each, 4 * count]
    assert machine.assumed == (f"placement assumed: {count} nodes of GB200 are {told}",)


def test_experts_over_64_ranks_stay_in_a_rack_that_a_run_of_whole_racks_lacks() -> None:
    """64 of a rack's 72 devices hold a group; where all 72 are used, groups lie across its edge."""
    even, packed = (build_hardware_model(read_cluster(f"{count}x4 GB200, 4x400G")) for count in (64, 144))
    assert not leaves_innermost_level(even, RankGroup(64))
    assert leaves_innermost_level(packed, RankGroup(64))
    exchange = [all_to_all_seconds(one, RankGroup(64), 1e9) for one in (even, packed)]
    assert exchange[1] > 5 * exchange[0]


def test_cards_that_devices_share_are_split_between_them() -> None:
    (_, between) = build_hardware_model(read_cluster("16x8 A100, 4x100G")).links
    assert between.bandwidth_bytes_per_second == pytest.approx(0.9 * 4 * 12.5e9 / 8)


def test_pcie_is_shared_beyond_a_pair() -> None:
    pair, rest = build_hardware_model(read_cluster("1x8 L40S")).links
    assert (pair.devices, rest.devices) == (2, 8)
    assert pair.bandwidth_bytes_per_second == pytest.approx(19.5e9, rel=0.01)
    assert rest.bandwidth_bytes_per_second < pair.bandwidth_bytes_per_second / 5


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_of_the_catalogue_is_forecast_at_a_plausible_rate(name: str) -> None:
    machine = build_hardware_model(Cluster((build_node_group(require_device_kind(name), nics=None),)))
    flops = 6.0 * 8 * (4 * 2048 * 2048 + 3 * 2048 * 8192) * 1024 * 32
    precision = "bf16" if "bf16" in machine.chip.products else "fp16"
    share = flops / step_seconds(machine) / machine.chip.peak_flops_per_second[precision]
    assert 0.1 < share < 0.8
    assert machine.unknown == ""
    assert bool(machine.assumed) == (machine.doubt > 0) == bool(DEVICE_EFFICIENCIES[name].estimate_basis)


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_of_the_catalogue_is_forecast_and_says_it_is_not_calibrated(name: str) -> None:
    machine = build_hardware_model(
        Cluster((build_node_group(require_device_kind(name), nics=None),)), ranks=4
    )
    assert 0 < step_seconds(machine, dp_replicate=4) < 1e4
    assert machine.doubt > 0.3
    assert "wanma bench machine --save" in machine.assumed[0]


def test_every_kind_attained_has_its_generation_and_is_in_the_catalogue() -> None:
    assert set(DEVICE_EFFICIENCIES) == set(ACCELERATORS)
    assert {one.generation for one in DEVICE_EFFICIENCIES.values()} == set(GENERATION_CURVES)


@pytest.mark.parametrize(
    ("peaks", "reference"),
    [
        ({"bf16": 300e12, "fp8": 600e12, "nvfp4": 1e15}, "B200"),
        ({"bf16": 300e12, "fp8": 600e12}, "H100 SXM"),
        ({"fp32": 20e12, "bf16": 300e12}, "A100 SXM 80 GB"),
        ({"fp32": 20e12, "fp16": 100e12}, "V100 SXM2 32 GB"),
        ({"fp32": 20e12}, "V100 SXM2 32 GB"),
    ],
)
def test_an_unknown_device_attains_as_the_nearest_generation(peaks: dict[str, float], reference: str) -> None:
    device = Device("cuda", "Brand New", 80 * 10**9, peaks, 2e12)
    assert nearest_catalogue_device(device) == reference
    machine = build_hardware_model(Cluster((NodeGroup("box", 64, 10**12, (device,)),)))
    assert machine.chip.sustained == DEVICE_EFFICIENCIES[reference].sustained_fraction
    assert machine.chip.peak_flops_per_second == peaks
    assert machine.doubt == 0.2
    assert reference in machine.assumed[0]


def test_a_catalogued_device_with_other_figures_keeps_its_curves_and_takes_the_figures(
    tmp_path: Path,
) -> None:
    cluster = described(
        tmp_path,
        """
        [[devices]]
        name = "H100 SXM"
        memory_gb = 80
        peak_teraflops = { bf16 = 500 }
        gb_per_second = 3350
        [[nodes]]
        device = "H100 SXM"
        devices = 2
        """,
    )
    machine = build_hardware_model(cluster)
    assert machine.chip.peak_flops_per_second == {"bf16": 500e12}
    assert machine.chip.products == {"bf16": GENERATION_CURVES["hopper"].matmul_curves["bf16"]}
    # Its own description names no link, so that of every server is assumed.
    assert "PCIe" in machine.assumed[0]
    assert machine.links[0].bandwidth_bytes_per_second == pytest.approx(31.5e9 * 0.06)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("peak_teraflops = { bf16 = 300 }", "'New' is unknown: give gb_per_second"),
        ("gb_per_second = 2000", "'New' is unknown: give peak_teraflops"),
    ],
)
def test_an_unknown_rate_leaves_a_machine_without_products_that_says_why(
    tmp_path: Path, device: str, told: str
) -> None:
    cluster = described(
        tmp_path,
        f"""
        [[devices]]
        name = "New"
        memory_gb = 80
        {device}
        [[nodes]]
        count = 2
        device = "New"
        devices = 4
        network = "1x100G"
        """,
    )
    machine = build_hardware_model(cluster)
    assert told in machine.unknown
    assert machine.chip.products == {}
    assert machine.device_count == 8


def test_nodes_without_a_network_are_not_forecast_and_one_node_is() -> None:
    node = build_node_group(require_device_kind("A100"), 2, nics=None)
    machine = build_hardware_model(Cluster((node,)))
    assert "the network between the 2 nodes" in machine.unknown
    assert build_hardware_model(Cluster((replace(node, count=1),))).unknown == ""


def test_a_node_of_unlike_devices_is_not_forecast() -> None:
    devices = (require_device_kind("A100").to_device(), require_device_kind("H100").to_device())
    machine = build_hardware_model(Cluster((NodeGroup("odd", 64, 10**12, devices),)))
    assert "odd has different devices" in machine.unknown


def test_ranks_of_a_processor_share_its_cores_and_its_memory() -> None:
    cluster = read_cluster("2x112 cores Xeon 8480+, 100G")
    whole, four = build_hardware_model(cluster), build_hardware_model(cluster, ranks=4)
    assert four.chip.multiprocessors == whole.chip.multiprocessors / 4 == 28
    for key in ("fp32", "bf16"):
        assert four.chip.peak_flops_per_second[key] == whole.chip.peak_flops_per_second[key] / 4
    assert four.chip.bandwidth_bytes_per_second == whole.chip.bandwidth_bytes_per_second / 4
    assert [link.devices for link in four.links] == [4, 8]
    assert four.links[1].bandwidth_bytes_per_second == pytest.approx(0.9 * 12.5e9 / 4)
    half = build_hardware_model(cluster, ranks=4, threads=14)
    assert half.chip.peak_flops_per_second["fp32"] == four.chip.peak_flops_per_second["fp32"] / 2


def test_a_processor_of_which_nothing_is_known_is_to_be_calibrated() -> None:
    machine = build_hardware_model(Cluster((NodeGroup("laptop", 8, 10**10, ()),)), ranks=2)
    assert "CPU of laptop is unknown" in machine.unknown
    assert machine.device_count == 2


def measured_on(cluster: Cluster, device: str, ranks: int, threads: int = 0) -> DeviceCalibration:
    own = build_hardware_model(cluster)
    chip = replace(own.chip, launch_seconds=9e-6)
    return DeviceCalibration(device, ranks, threads, HardwareModel(chip, (LinkLevel(ranks, 5e-6, 99e9),)))


def test_what_was_measured_counts_inside_a_machine_and_its_network_stays_the_clusters() -> None:
    cluster = read_cluster("4x8 B300, 8x800G")
    assert build_hardware_model(cluster).doubt > 0
    # Under its driver's name, while the cluster has the catalogue's.
    calibration = Calibration((measured_on(cluster, "NVIDIA B300", 4),))
    machine = build_hardware_model(cluster, 0, calibration)
    assert machine.chip.launch_seconds == 9e-6
    assert (machine.doubt, machine.assumed) == (0.0, ())
    assert machine.links == (LinkLevel(8, 5e-6, 99e9), build_hardware_model(cluster).links[1])


def test_a_device_measured_alone_tells_nothing_of_its_links() -> None:
    cluster = read_cluster("1x8 H100, 8x400G")
    machine = build_hardware_model(cluster, 0, Calibration((measured_on(cluster, "H100 SXM", 1),)))
    assert machine.chip.launch_seconds == 9e-6
    assert machine.links == build_hardware_model(cluster).links


def test_what_runs_taught_corrects_every_rate_also_where_nothing_was_measured() -> None:
    cluster = read_cluster("4x8 H100, 8x400G")
    taught = Calibration(
        corrections={"NVIDIA H100 80GB HBM3": CorrectionFactors(compute=1.25, communication=2.0)}
    )
    plain, corrected = build_hardware_model(cluster), build_hardware_model(cluster, 0, taught)
    assert corrected.chip.sustained == pytest.approx(plain.chip.sustained / 1.25)
    for before, after in zip(plain.links, corrected.links, strict=True):
        assert after.bandwidth_bytes_per_second == before.bandwidth_bytes_per_second / 2


def test_a_kind_of_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="node kind 1 of 1"):
        build_hardware_model(read_cluster("8 H100"), 1)


layouts = st.sampled_from(
    [
        {"dp_shard": 16, "shard": "parameters"},
        {"tp": 8, "sequence_parallel": True, "dp_replicate": 2},
        {"tp": 16},
        {"pp": 4, "dp_shard": 4, "shard": "optimizer"},
        {"cp": 4, "dp_shard": 4, "shard": "parameters"},
    ]
)


@settings(max_examples=30, deadline=None)
@given(layouts, st.floats(1.0, 8.0), st.sampled_from(["link", "network", "memory", "peak"]))
def test_nothing_that_is_faster_slows_a_step(layout: dict[str, object], factor: float, what: str) -> None:
    node = build_node_group(require_device_kind("A100"), 2, nics=Nics(4, 100e9))
    if what == "memory":
        device = replace(
            node.devices[0],
            bandwidth_bytes_per_second=(node.devices[0].bandwidth_bytes_per_second or 0) * factor,
        )
        faster = replace(node, devices=(device,) * 8)
    elif what == "peak":
        peaks = {name: rate * factor for name, rate in node.devices[0].peak_flops_per_second.items()}
        faster = replace(node, devices=(replace(node.devices[0], peak_flops_per_second=peaks),) * 8)
    elif what == "link":
        faster = replace(node, inside=tuple(_faster(level, factor) for level in node.inside))
    else:
        faster = replace(node, network=tuple(_faster(level, factor) for level in node.network))
    before = step_seconds(build_hardware_model(Cluster((node,))), **layout)
    assert step_seconds(build_hardware_model(Cluster((faster,))), **layout) <= before * (1 + 1e-9)


def _faster(level: InterconnectLevel, factor: float) -> InterconnectLevel:
    return replace(level, bandwidth_bytes_per_second=level.bandwidth_bytes_per_second * factor)


def test_a_device_reaches_its_host_as_its_datasheet_says(tmp_path: Path) -> None:
    lanes = {"V100": 15.75, "A100": 31.5, "H100": 63.0, "MI300X": 63.0, "GB200": 225.0, "RTX 4090": 31.5}
    for name, gigabytes in lanes.items():
        found = build_hardware_model(read_cluster(f"8x {name}" if name != "GB200" else "4x GB200"))
        assert found.host.link_bytes_per_second == pytest.approx(HOST_LINK_SHARE * gigabytes * 1e9), name
        assert found.host.doubt > 0
    own = described(
        tmp_path,
        '[[devices]]\nname = "mine"\nmemory_gb = 80\npeak_teraflops = { bf16 = 300 }\n'
        "gb_per_second = 2000\nhost_gb_per_second = 100\n"
        '[[nodes]]\ndevice = "mine"\ndevices = 4\ndisk_gb_per_second = 12\n',
    )
    host = build_hardware_model(own).host
    assert host.link_bytes_per_second == pytest.approx(HOST_LINK_SHARE * 100e9)
    assert host.disk_bytes_per_second == 12e9 / 4


def test_ranks_of_a_machine_share_its_disk_and_its_memory() -> None:
    cluster = read_cluster("1x 64 cores EPYC 7742")
    alone, shared = (build_hardware_model(cluster, ranks=ranks).host for ranks in (1, 8))
    assert alone.disk_bytes_per_second == DISK_BYTES_PER_SECOND == 8 * shared.disk_bytes_per_second
    assert alone.memory_bytes_per_second == pytest.approx(8 * shared.memory_bytes_per_second)


def test_a_measured_host_counts_before_what_is_known_of_its_kind() -> None:
    cluster = read_cluster("8x H100")
    plain = build_hardware_model(cluster)
    for host, counts in ((HostModel(link_bytes_per_second=1e9, doubt=0.0), True), (HostModel(1e9), False)):
        measured = DeviceCalibration("H100 SXM", 8, 0, replace(plain, host=host))
        found = build_hardware_model(cluster, calibration=Calibration((measured,)))
        assert found.host == (host if counts else plain.host)
