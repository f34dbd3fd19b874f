"""Hardware models of the published rows, from the catalogue and their sources."""

from __future__ import annotations

from functools import cache

from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import Nics, build_node_group
from wanma.job.cluster import Cluster
from wanma.planner.hardware_model.builder import build_hardware_model
from wanma.planner.hardware_model.model import HardwareModel


@cache
def machine(device: str, devices: int, network_gigabits: float | None = None) -> HardwareModel:
    """Return the hardware model of `devices` of a catalogue entry, in the servers that they usually come in.

    Args:
        network_gigabits: Gbit/s of one server, all its cards together; None: as usual.
    """
    return build_hardware_model(cluster(device, devices, network_gigabits))


def cluster(device: str, devices: int, network_gigabits: float | None = None) -> Cluster:
    kind = require_device_kind(device)
    assert kind.server is not None
    here = min(kind.server.devices, devices)
    # Fewer than a server holds have its cards nevertheless, and use none.
    cards = Nics(kind.server.nic_count, kind.server.nic_bits_per_second)
    if network_gigabits is not None:
        cards = Nics(1, network_gigabits * 1e9)
    return Cluster((build_node_group(kind, devices // here, here, nics=cards),))
