"""The network of pods: a bridge, an address for each pod, and the names that Services give.

https://kubernetes.io/docs/concepts/services-networking/dns-pod-service/
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.kubernetes.resources import Object, has_condition
from support.networks import ip


class PodNetwork:
    """A bridge of this machine, and network namespaces that are joined to it.

    Attributes:
        gateway: address of this machine, as pods reach it.
    """

    def __init__(self) -> None:
        self._numbers = iter(range(2, 65000))
        owner = os.getpid().to_bytes(4, "big").hex(":")  # by which a bridge that was left is known
        for number in range(100):
            self.bridge, self._subnet = f"wk8s{number}", f"10.{130 + number}"
            _remove_abandoned(self.bridge)
            command = ["ip", "link", "add", self.bridge, "address", f"02:00:{owner}", "type", "bridge"]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                break
        self.gateway = f"{self._subnet}.0.1"
        ip("addr", "add", f"{self.gateway}/16", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def add(self) -> tuple[str, str]:
        """Return name and address of another namespace."""
        number = next(self._numbers)
        name, address = f"{self.bridge}-{number}", f"{self._subnet}.{number // 256}.{number % 256}"
        cable = f"{self.bridge}.{number}"
        ip("netns", "add", name)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", cable, "master", self.bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "eth0", "up")
        return name, address

    def remove(self, name: str) -> None:
        ip("netns", "del", name)

    def close(self) -> None:
        _remove(self.bridge)


def service_names(services: list[Object], pods: list[tuple[Object, str]]) -> Iterator[str]:
    """Yield the lines of `/etc/hosts` for the headless Services and the pods of a namespace."""
    for service in services:
        spec, name = service["spec"], service["metadata"]["name"]
        selector = spec.get("selector", {})
        for pod, address in pods if selector and spec.get("clusterIP") == "None" else []:
            is_ready = has_condition(pod, "Ready") or spec.get("publishNotReadyAddresses")
            if not is_ready or not selector.items() <= pod["metadata"].get("labels", {}).items():
                continue
            hosts, space = [name], pod["metadata"]["namespace"]
            if "hostname" in pod["spec"] and pod["spec"].get("subdomain") == name:
                hosts.append(f"{pod['spec']['hostname']}.{name}")
            for host in hosts:
                yield f"{address} {host}.{space}.svc.cluster.local {host}.{space}.svc {host}.{space} {host}"


def _remove(bridge: str) -> None:
    for path in Path("/run/netns").glob(f"{bridge}-*"):
        ip("netns", "del", path.name)
    ip("link", "del", bridge)


def _remove_abandoned(bridge: str) -> None:
    """Remove the network of a test that was killed."""
    with contextlib.suppress(OSError):
        address = Path(f"/sys/class/net/{bridge}/address").read_text().strip()
        if not Path(f"/proc/{int(address[6:].replace(':', ''), 16)}").exists():
            _remove(bridge)
