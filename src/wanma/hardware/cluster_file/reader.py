"""Reader of cluster files: TOML (or YAML) that describes nodes; documented in `docs/guides`.

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
    NETWORK_LATENCY_SECONDS,
    NVLINK_LATENCY_SECONDS,
    PCIE_LATENCY_SECONDS,
    TERA,
    DeviceKind,
    DeviceLink,
)
from wanma.hardware.catalogue.lookup import CATALOGUE, find_by_name, list_known_names
from wanma.hardware.cluster_file.host_list import expand_host_list
from wanma.hardware.cluster_file.node_builder import (
    DEFAULT_MEMORY_BYTES,
    Nics,
    build_node_group,
    default_nics,
    inter_node_levels,
    parse_nics,
)
from wanma.hardware.cluster_file.schema import (
    NO_NETWORK,
    ClusterFile,
    DeviceSection,
    LevelSection,
    NodesSection,
)
from wanma.hardware.cluster_file.shorthand import is_shorthand, parse_shorthand
from wanma.job.cluster import Cluster, InterconnectLevel, NodeGroup
from wanma.job.errors import JobError, did_you_mean
from wanma.job.file.key_lines import KeyPath
from wanma.job.file.loading import to_json_value
from wanma.job.file.parser import parse_config_file
from wanma.job.file.validation import (
    KeySources,
    ValidationIssue,
    issues_from_pydantic,
    key_path_text,
    validation_error,
)

CREATE_FILE_HINT = (
    "run `wanma cluster > cluster.toml` to describe this node, or give a shorthand such as "
    "'8x8 H100 SXM, 4x100G'"
)
KEYS_HINT = "see docs/reference/cluster-file.md for all keys and their values"


def read_cluster(description: str) -> Cluster:
    """Return the cluster of a file, or of a shorthand such as '8x8 H100 SXM, 4x100G'.

    Raises:
        JobError: as `load_cluster_file` and `parse_shorthand`.
    """
    if not description.strip():
        raise JobError("the cluster description is empty", CREATE_FILE_HINT)
    if is_shorthand(description) and not Path(description).is_file():
        return parse_shorthand(description)
    if (kind := find_by_name(description)) is not None and not Path(description).exists():
        raise JobError(
            f"'{description}' is a device, not a cluster", f"give node and device counts: '1x8 {kind.name}'"
        )
    return load_cluster_file(Path(description))


def load_cluster_file(path: Path) -> Cluster:
    """Return the cluster that a file describes.

    Raises:
        JobError: the file cannot be read, or has invalid entries; the message names each one's line.
    """
    tables, lines = parse_config_file(path, "cluster file", CREATE_FILE_HINT)
    sources = KeySources(str(path), lines)
    mistakes: list[ValidationIssue] = []
    values = to_json_value(tables, (), mistakes)
    if mistakes:
        raise validation_error(mistakes, sources, "the cluster", KEYS_HINT)
    if not values.get("nodes"):
        hint = 'add, for example, [[nodes]] with count = 8, device = "H100 SXM", network = "8x400G"'
        raise JobError(f"{path}: the cluster has no [[nodes]]", hint)
    try:
        file = ClusterFile.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise validation_error(
            issues_from_pydantic(error, values, ClusterFile), sources, "the cluster", KEYS_HINT
        ) from None
    builder = _ClusterBuilder(file, str(path))
    cluster = builder.cluster()
    if cluster is None:
        raise validation_error(builder.issues, sources, "the cluster", KEYS_HINT)
    return cluster


class _ClusterBuilder:
    """Builder of nodes from sections; it collects mistakes instead of raising."""

    def __init__(self, file: ClusterFile, source: str) -> None:
        self.file = file
        self.source = source
        self.issues: list[ValidationIssue] = []
        self.custom_devices: dict[str, DeviceKind] = {}
        self.hosts: set[str] = set()

    def cluster(self) -> Cluster | None:
        """Return the cluster; None if there are mistakes."""
        for number, device in enumerate(self.file.devices):
            if device.name in self.custom_devices:
                self._add_error(("devices", number, "name"), f"'{device.name}' is described twice")
            self.custom_devices[device.name] = self._device_kind(device, ("devices", number))
        nodes = [
            self._node_group(section, ("nodes", number)) for number, section in enumerate(self.file.nodes)
        ]
        if self.issues:
            return None
        section, level = self.file.between, None
        if section.gb_per_second is not None:
            latency = _seconds(section.latency_microseconds, NETWORK_LATENCY_SECONDS)
            level = InterconnectLevel(section.name, _bytes(section.gb_per_second), latency)
        return Cluster(tuple(node for node in nodes if node is not None), level)

    def _device_kind(self, device: DeviceSection, key_path: KeyPath) -> DeviceKind:
        link = None
        if device.link_gb_per_second is not None:
            latency = _seconds(device.link_latency_microseconds, NVLINK_LATENCY_SECONDS)
            link = DeviceLink(device.link or "link", _bytes(device.link_gb_per_second), latency)
        elif device.link is not None:
            self._add_error((*key_path, "link"), "needs link_gb_per_second too")
        if device.kind == "cpu" and device.cores is None:
            self._add_error(
                key_path,
                f"the processor '{device.name}' needs cores: the number of cores that its figures refer to",
            )
        peak = {name: float(round(rate * TERA)) for name, rate in device.peak_teraflops.items()}
        return DeviceKind(
            name=device.name,
            driver_name_pattern="",
            peak_flops_per_second=MappingProxyType(peak),
            memory_bytes=round(device.memory_gb * GIGABYTE),
            bandwidth_bytes_per_second=None if device.gb_per_second is None else _bytes(device.gb_per_second),
            source=self.source,
            kind=device.kind,
            power_watts=device.power_watts,
            link=link,
            host_link=None
            if device.host_gb_per_second is None
            else DeviceLink("host", _bytes(device.host_gb_per_second), PCIE_LATENCY_SECONDS),
            cores=device.cores or 1,
        )

    def _node_group(self, section: NodesSection, key_path: KeyPath) -> NodeGroup | None:
        issue_count = len(self.issues)
        hosts = self._hosts(section, (*key_path, "hosts"))
        if hosts and "count" not in section.model_fields_set:
            section = section.model_copy(update={"count": len(hosts)})
        kind = self._find_device_kind(section.device, (*key_path, "device"))
        cpu = self._find_device_kind(section.cpu, (*key_path, "cpu"))
        cards = self._nics(section, kind, (*key_path, "network"))
        if kind is not None and kind.kind == "cpu":
            self._add_error(
                (*key_path, "device"), f'{kind.name} is a processor: write cpu = "{section.device}"'
            )
        if cpu is not None and cpu.kind != "cpu":
            self._add_error(
                (*key_path, "cpu"), f'{cpu.name} is not a processor: write device = "{section.cpu}"'
            )
        if section.device is None and section.devices is not None:
            self._add_error((*key_path, "devices"), f"= {section.devices} needs the key device too")
        if section.device is None and section.cpu is None and section.cores is None:
            self._add_error(key_path, "give a device, a cpu or cores")
        if len(self.issues) > issue_count:
            return None
        node = replace(_build_nodes(section, kind, cpu, cards), hosts=hosts)
        link = node.inside[0] if node.inside else None
        card = node.network[-1] if cards else None
        inside_levels = self._levels(section, True, link, len(node.devices) or None, (*key_path, "levels"))
        network_levels = self._levels(section, False, card, None, (*key_path, "levels"))
        try:
            return replace(node, inside=inside_levels or node.inside, network=network_levels or node.network)
        except JobError as error:
            self._add_error((*key_path, "levels"), error.message.partition(": ")[2])
            return None

    def _hosts(self, section: NodesSection, key_path: KeyPath) -> tuple[str, ...]:
        """Expand the host lists of a section; no host may occur twice in the file."""
        hosts: list[str] = []
        for text in section.hosts:
            try:
                hosts += expand_host_list(text)
            except ValueError as error:
                self._add_error(key_path, str(error))
                return ()
        for host in hosts:
            if host in self.hosts:
                self._add_error(key_path, f"names '{host}' twice")
                return ()
            self.hosts.add(host)
        if hosts and "count" in section.model_fields_set and len(hosts) != section.count:
            self._add_error(key_path, f"names {len(hosts)} hosts, but count = {section.count}")
        return tuple(hosts)

    def _levels(
        self,
        section: NodesSection,
        is_inside: bool,
        default_level: InterconnectLevel | None,
        max_size: int | None,
        key_path: KeyPath,
    ) -> tuple[InterconnectLevel, ...]:
        """Return the levels of a section; bandwidth and latency default to those of `default_level`."""
        levels = []
        for number, level in enumerate(section.levels):
            if level.inside != is_inside:
                continue
            bandwidth = _bandwidth(level, default_level)
            if bandwidth is None:
                default = "link" if is_inside else "network"
                self._add_error(
                    (*key_path, number),
                    f"the level '{level.name}' needs gb_per_second: the node has no known {default}",
                )
                continue
            if max_size is not None and level.size is not None and level.size > max_size:
                self._add_error(
                    (*key_path, number, "size"), f"= {level.size}, but a node has {max_size} devices"
                )
            latency = (
                default_level.latency_seconds
                if default_level
                else NVLINK_LATENCY_SECONDS
                if is_inside
                else NETWORK_LATENCY_SECONDS
            )
            latency = _seconds(level.latency_microseconds, latency)
            levels.append(InterconnectLevel(level.name, bandwidth, latency, level.size))
        return tuple(levels)

    def _find_device_kind(self, name: str | None, key_path: KeyPath) -> DeviceKind | None:
        if name is None:
            return None
        kind = self.custom_devices.get(name) or find_by_name(name)
        if kind is None:
            names = [*self.custom_devices, *(kind.name for kind in CATALOGUE)]
            suggestion = did_you_mean(name, [*self.custom_devices, *list_known_names()])
            text = f"= '{name}' is not a known device.{suggestion}"
            self._add_error(
                key_path, text, f"known devices: {', '.join(names)}; describe others under [[devices]]"
            )
        return kind

    def _nics(self, section: NodesSection, kind: DeviceKind | None, key_path: KeyPath) -> Nics | None:
        if section.network is None:
            return default_nics(kind) if kind else None
        if section.network == NO_NETWORK:
            return None
        try:
            return parse_nics(section.network)
        except JobError as error:
            self._add_error(key_path, error.message, error.hint)
            return None

    def _add_error(self, key_path: KeyPath, text: str, hint: str = "") -> None:
        joint = " " if text.startswith("=") else ": "
        self.issues.append(ValidationIssue(key_path, f"{key_path_text(key_path)}{joint}{text}", hint))


def _build_nodes(
    section: NodesSection, kind: DeviceKind | None, cpu: DeviceKind | None, nics: Nics | None
) -> NodeGroup:
    """Return the nodes of a section with their default levels."""
    memory_bytes = None if section.memory_gb is None else round(section.memory_gb * GIGABYTE)
    main = kind or cpu
    if main is None:
        cores = section.cores or 1
        node = NodeGroup(
            section.name or "cpu", cores, memory_bytes or DEFAULT_MEMORY_BYTES, (), section.count
        )
        if nics is not None:
            node = replace(
                node,
                network=inter_node_levels(nics, 1),
                nics=nics.count,
                nic_bytes_per_second=nics.bytes_per_second,
            )
    else:
        node = build_node_group(
            main,
            section.count,
            section.devices,
            nics=nics,
            cores=section.cores,
            memory_bytes=memory_bytes,
            name=section.name,
        )
    if cpu is not None:
        node = replace(node, cpu=cpu.to_processor(node.cores, node.memory_bytes))
    power_watts = node.power_watts if section.power_watts is None else section.power_watts
    disk = None if section.disk_gb_per_second is None else _bytes(section.disk_gb_per_second)
    store = None if section.store_gb_per_second is None else _bytes(section.store_gb_per_second)
    latency = section.store_latency_milliseconds
    return replace(
        node,
        power_watts=power_watts,
        store_bytes_per_second=store,
        store_latency_seconds=None if latency is None else latency / 1e3,
        price_per_hour=section.price_per_hour,
        disk_bytes_per_second=disk,
        days_between_failures=section.days_between_failures,
    )


def _bandwidth(level: LevelSection, default_level: InterconnectLevel | None) -> float | None:
    if level.gb_per_second is not None:
        return _bytes(level.gb_per_second)
    return default_level.bandwidth_bytes_per_second if default_level else None


def _bytes(gigabytes: float) -> float:
    """Convert 10⁹ bytes per second to whole bytes, so that a figure survives being written and read."""
    return float(round(gigabytes * GIGABYTE))


def _seconds(microseconds: float | None, default: float) -> float:
    """Convert to seconds in whole picoseconds, so that a figure survives being written and read."""
    return default if microseconds is None else round(microseconds * 1e6) / 1e12
