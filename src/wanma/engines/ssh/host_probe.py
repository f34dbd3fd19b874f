"""Program that reports the facts of a host: versions, hardware, addresses, clock and disk."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import socket
import struct
import sys
import time
from typing import Any, Callable, Dict, List


def main(request: Dict[str, Any], reply: Callable[[Any], None]) -> int:
    """Reply with the facts of this host.

    Args:
        request: `folder`, for the run's files; `has_hardware`: the hardware is read, by wanma; `data`:
            names with a path or glob each, of which the facts have the names of those that are here.
        reply: sends the facts.
    """
    folder = os.path.expanduser(request["folder"])
    facts: Dict[str, Any] = {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in ("wanma", "torch")},
        "home": os.path.expanduser("~"),
        "folder": folder,
        "free_bytes": shutil.disk_usage(_existing(folder)).free,
        "addresses": _addresses(),
        "reached_at": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2],
        "data": [
            name for name, path in request.get("data", {}).items() if glob.glob(os.path.expanduser(path))
        ],
        "cluster": None,
        "discovery_problem": "",
    }
    if request["has_hardware"] and sys.version_info >= (3, 11) and facts["versions"]["wanma"] is not None:
        try:
            from wanma.hardware.discovery.node import discover_node

            facts["cluster"] = discover_node().to_json()
        except Exception as error:  # reported with the host's name
            facts["discovery_problem"] = f"{type(error).__name__}: {error}"
    facts["time"] = time.time()
    reply(facts)
    return 0


def _version(package: str) -> str | None:
    try:
        import importlib.metadata

        return importlib.metadata.version(package)
    except Exception:  # a Python without this module, or no such package
        return None


def _existing(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path) or "/"
    return path


def _addresses() -> List[List[str]]:
    """Return name and IPv4 address of each network interface, the loopback last."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            query = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, query)  # SIOCGIFADDR
            except OSError:  # the interface has no IPv4 address
                continue
            found.append([name, socket.inet_ntoa(answer[20:24])])
    return sorted(found, key=lambda entry: entry[1].startswith("127."))
