"""Hardware models of the published rows, from the catalogue and their sources."""

from __future__ import annotations

from functools import cache

from wanma.hardware.catalogue.lookup import named
from wanma.hardware.cluster_file.node_builder import Cards, machines
from wanma.job.cluster import Cluster
from wanma.planner.hardware_model.builder import machine_of
from wanma.planner.hardware_model.model import Machine


@cache
def machine(device: str, devices: int, network_gigabits: float | None = None) -> Machine:
    """Return the hardware model of `devices` of a catalogue entry, in the servers that they usually come in.

    Args:
        network_gigabits: Gbit/s of one server, all its cards together; None: as usual.
    """
    return machine_of(cluster(device, devices, network_gigabits))


def cluster(device: str, devices: int, network_gigabits: float | None = None) -> Cluster:
    kind = named(device)
    assert kind.server is not None
    here = min(kind.server.devices, devices)
    # Fewer than a server holds have its cards nevertheless, and use none.
    cards = Cards(kind.server.nics, kind.server.nic_bits_per_second)
    if network_gigabits is not None:
        cards = Cards(1, network_gigabits * 1e9)
    return Cluster((machines(kind, devices // here, here, cards=cards),))
