"""Reader of cluster files: TOML (or YAML) that describes nodes; `docs/clusters.md` documents them.

    cluster = read_cluster("cluster.toml")

Only a device's name is required; other keys default to those of the device's reference server.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from wanma.hardware.catalogue.device_kind import (
    GIGABYTE,
    NETWORK_SECONDS,
    NVLINK_SECONDS,
    PCIE_SECONDS,
    TERA,
    DeviceKind,
    Link,
)
from wanma.hardware.catalogue.lookup import CATALOGUE, find_named, spellings
from wanma.hardware.cluster_file.host_list import expand_hosts
from wanma.hardware.cluster_file.node_builder import (
    MEMORY_BYTES,
    Cards,
    machines,
    network,
    read_cards,
    usual_cards,
)
from wanma.hardware.cluster_file.schema import (
    NO_NETWORK,
    ClusterFile,
    DeviceSection,
    LevelSection,
    NodesSection,
)
from wanma.hardware.cluster_file.shorthand import is_text, parse_cluster
from wanma.job.cluster import Cluster, Level, Node
from wanma.job.errors import JobError, did_you_mean
from wanma.job.file.key_lines import KeyPath
from wanma.job.file.loading import plain
from wanma.job.file.parser import read_tables
from wanma.job.file.validation import Mistake, Places, dotted, from_pydantic, refuse

STARTER = "`wanma cluster > cluster.toml` writes this machine's; '8x8 H100 SXM, 4x100G' needs no file"
KEYS = "docs/clusters.md lists every key with what it allows"


def read_cluster(said: str) -> Cluster:
    """Return the cluster of a file, or of a shorthand such as '8x8 H100 SXM, 4x100G'.

    Raises:
        JobError: as `load_cluster` and `parse_cluster`.
    """
    if not said.strip():
        raise JobError("no cluster is named", STARTER)
    if is_text(said) and not Path(said).is_file():
        return parse_cluster(said)
    if (kind := find_named(said)) is not None and not Path(said).exists():
        raise JobError(f"'{said}' names a device, and no machines", f"say how many: '1x8 {kind.name}'")
    return load_cluster(Path(said))


def load_cluster(path: Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        JobError: the file cannot be read, or has invalid entries; the message names each one's line.
    """
    tables, lines = read_tables(path, "cluster file", STARTER)
    places = Places(str(path), lines)
    mistakes: list[Mistake] = []
    given = plain(tables, (), mistakes)
    if mistakes:
        raise refuse(mistakes, places, "the cluster", KEYS)
    if not given.get("nodes"):
        hint = 'it needs, for example: [[nodes]] with count = 8, device = "H100 SXM", network = "8x400G"'
        raise JobError(f"{path}: the cluster has no [[nodes]]", hint)
    try:
        file = ClusterFile.model_validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        raise refuse(from_pydantic(error, given, ClusterFile), places, "the cluster", KEYS) from None
    builder = _Builder(file, str(path))
    cluster = builder.cluster()
    if cluster is None:
        raise refuse(builder.mistakes, places, "the cluster", KEYS)
    return cluster


class _Builder:
    """Builder of nodes from sections; it collects mistakes instead of raising."""

    def __init__(self, file: ClusterFile, source: str) -> None:
        self.file = file
        self.source = source
        self.mistakes: list[Mistake] = []
        self.own: dict[str, DeviceKind] = {}
        self.hosts: set[str] = set()

    def cluster(self) -> Cluster | None:
        """Return the cluster; None if there are mistakes."""
        for number, device in enumerate(self.file.devices):
            if device.name in self.own:
                self._wrong(("devices", number, "name"), f"'{device.name}' is described twice")
            self.own[device.name] = self._kind(device, ("devices", number))
        nodes = [self._nodes(section, ("nodes", number)) for number, section in enumerate(self.file.nodes)]
        if self.mistakes:
            return None
        between, level = self.file.between, None
        if between.gb_per_second is not None:
            latency = _seconds(between.latency_microseconds, NETWORK_SECONDS)
            level = Level(between.name, _bytes(between.gb_per_second), latency)
        return Cluster(tuple(node for node in nodes if node is not None), level)

    def _kind(self, device: DeviceSection, at: KeyPath) -> DeviceKind:
        link = None
        if device.link_gb_per_second is not None:
            latency = _seconds(device.link_latency_microseconds, NVLINK_SECONDS)
            link = Link(device.link or "link", _bytes(device.link_gb_per_second), latency)
        elif device.link is not None:
            self._wrong((*at, "link"), "needs link_gb_per_second beside it")
        if device.kind == "cpu" and device.cores is None:
            self._wrong(at, f"the processor '{device.name}' needs cores: how many its figures are of")
        peak = {name: float(round(rate * TERA)) for name, rate in device.peak_teraflops.items()}
        return DeviceKind(
            name=device.name,
            driver_name="",
            peak_flops_per_second=MappingProxyType(peak),
            memory_bytes=round(device.memory_gb * GIGABYTE),
            bandwidth_bytes_per_second=None if device.gb_per_second is None else _bytes(device.gb_per_second),
            source=self.source,
            kind=device.kind,
            power_watts=device.power_watts,
            link=link,
            host_link=None
            if device.host_gb_per_second is None
            else Link("host", _bytes(device.host_gb_per_second), PCIE_SECONDS),
            cores=device.cores or 1,
        )

    def _nodes(self, section: NodesSection, at: KeyPath) -> Node | None:
        before = len(self.mistakes)
        hosts = self._hosts(section, (*at, "hosts"))
        if hosts and "count" not in section.model_fields_set:
            section = section.model_copy(update={"count": len(hosts)})
        kind = self._named(section.device, (*at, "device"))
        cpu = self._named(section.cpu, (*at, "cpu"))
        cards = self._cards(section, kind, (*at, "network"))
        if kind is not None and kind.kind == "cpu":
            self._wrong((*at, "device"), f'{kind.name} is a processor: write cpu = "{section.device}"')
        if cpu is not None and cpu.kind != "cpu":
            self._wrong((*at, "cpu"), f'{cpu.name} is no processor: write device = "{section.cpu}"')
        if section.device is None and section.devices is not None:
            self._wrong((*at, "devices"), f"= {section.devices}: of which device? Say device = ... too")
        if section.device is None and section.cpu is None and section.cores is None:
            self._wrong(at, "give a device, a cpu or cores")
        if len(self.mistakes) > before:
            return None
        node = replace(_machines(section, kind, cpu, cards), hosts=hosts)
        link = node.inside[0] if node.inside else None
        card = node.network[-1] if cards else None
        within = self._levels(section, True, link, len(node.devices) or None, (*at, "levels"))
        beyond = self._levels(section, False, card, None, (*at, "levels"))
        try:
            return replace(node, inside=within or node.inside, network=beyond or node.network)
        except JobError as error:
            self._wrong((*at, "levels"), error.message.partition(": ")[2])
            return None

    def _hosts(self, section: NodesSection, at: KeyPath) -> tuple[str, ...]:
        """Expand the host lists of a section; no host may occur twice in the file."""
        hosts: list[str] = []
        for text in section.hosts:
            try:
                hosts += expand_hosts(text)
            except ValueError as error:
                self._wrong(at, str(error))
                return ()
        for host in hosts:
            if host in self.hosts:
                self._wrong(at, f"names '{host}' twice")
                return ()
            self.hosts.add(host)
        if hosts and "count" in section.model_fields_set and len(hosts) != section.count:
            self._wrong(at, f"names {len(hosts)} machines, and count = {section.count}")
        return tuple(hosts)

    def _levels(
        self, section: NodesSection, inside: bool, usual: Level | None, most: int | None, at: KeyPath
    ) -> tuple[Level, ...]:
        """Return the levels of a section; bandwidth and latency default to those of `usual`."""
        levels = []
        for number, level in enumerate(section.levels):
            if level.inside != inside:
                continue
            bandwidth = _bandwidth(level, usual)
            if bandwidth is None:
                default = "link" if inside else "network"
                self._wrong(
                    (*at, number), f"the level '{level.name}' needs gb_per_second: no {default} is known"
                )
                continue
            if most is not None and level.size is not None and level.size > most:
                self._wrong((*at, number, "size"), f"= {level.size}: a node has {most} devices")
            latency = usual.latency_seconds if usual else NVLINK_SECONDS if inside else NETWORK_SECONDS
            latency = _seconds(level.latency_microseconds, latency)
            levels.append(Level(level.name, bandwidth, latency, level.size))
        return tuple(levels)

    def _named(self, name: str | None, at: KeyPath) -> DeviceKind | None:
        if name is None:
            return None
        kind = self.own.get(name) or find_named(name)
        if kind is None:
            names = [*self.own, *(kind.name for kind in CATALOGUE)]
            meant = did_you_mean(name, [*self.own, *spellings()])
            text = f"= '{name}': there is no such device.{meant}"
            self._wrong(at, text, f"devices: {', '.join(names)}; describe others under [[devices]]")
        return kind

    def _cards(self, section: NodesSection, kind: DeviceKind | None, at: KeyPath) -> Cards | None:
        if section.network is None:
            return usual_cards(kind) if kind else None
        if section.network == NO_NETWORK:
            return None
        try:
            return read_cards(section.network)
        except JobError as error:
            self._wrong(at, error.message, error.hint)
            return None

    def _wrong(self, at: KeyPath, text: str, hint: str = "") -> None:
        joint = " " if text.startswith("=") else ": "
        self.mistakes.append(Mistake(at, f"{dotted(at)}{joint}{text}", hint))


def _machines(
    section: NodesSection, kind: DeviceKind | None, cpu: DeviceKind | None, cards: Cards | None
) -> Node:
    """Return the nodes of a section with their default levels."""
    memory_bytes = None if section.memory_gb is None else round(section.memory_gb * GIGABYTE)
    main = kind or cpu
    if main is None:
        cores = section.cores or 1
        node = Node(section.name or "cpu", cores, memory_bytes or MEMORY_BYTES, (), section.count)
        if cards is not None:
            node = replace(
                node,
                network=network(cards, 1),
                nics=cards.number,
                nic_bytes_per_second=cards.bytes_per_second,
            )
    else:
        node = machines(
            main,
            section.count,
            section.devices,
            cards=cards,
            cores=section.cores,
            memory_bytes=memory_bytes,
            name=section.name,
        )
    if cpu is not None:
        node = replace(node, cpu=cpu.processors(node.cores, node.memory_bytes))
    power_watts = node.power_watts if section.power_watts is None else section.power_watts
    disk = None if section.disk_gb_per_second is None else _bytes(section.disk_gb_per_second)
    return replace(
        node,
        power_watts=power_watts,
        price_per_hour=section.price_per_hour,
        disk_bytes_per_second=disk,
        days_between_failures=section.days_between_failures,
    )


def _bandwidth(level: LevelSection, usual: Level | None) -> float | None:
    if level.gb_per_second is not None:
        return _bytes(level.gb_per_second)
    return usual.bandwidth_bytes_per_second if usual else None


def _bytes(gigabytes: float) -> float:
    """Convert 10⁹ bytes per second to whole bytes, so that a figure survives being written and read."""
    return float(round(gigabytes * GIGABYTE))


def _seconds(microseconds: float | None, default: float) -> float:
    """Convert to seconds in whole picoseconds, so that a figure survives being written and read."""
    return default if microseconds is None else round(microseconds * 1e6) / 1e12
