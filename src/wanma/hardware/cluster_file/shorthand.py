"""Cluster shorthand: a cluster in one line, '8x8 H100 SXM, 4x100G + 16x8 A100 40GB'.

Every part is NODES x DEVICES NAME, then the network cards of one node. A network that is given once
holds for all parts; where none is given, the cards are those of the device's reference server.
`str(cluster)` prints the same form, longer: '8 nodes of 8 × H100 SXM, 4 × 100G'.
"""

from __future__ import annotations

import re

from wanma.hardware.catalogue.lookup import require_device_kind
from wanma.hardware.cluster_file.node_builder import (
    MAX_CORES,
    MAX_DEVICES,
    MAX_NODES,
    MAX_SOCKETS,
    Nics,
    build_node_group,
    default_nics,
    parse_nics,
)
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError

SHORTHAND_EXAMPLE = "8x8 H100 SXM, 4x100G + 16x8 A100 40GB"

# A part begins with a number: the + in 'Xeon 8480+' separates nothing. A negative number is parsed
# so that it can be rejected.
_PART_SEPARATOR = re.compile(r"\s*\+\s*(?=\d)")
_NODES_PATTERN = re.compile(
    r"(?:(?P<nodes>-?\d+)\s*(?:nodes?\s+of\s|[x×*])\s*)?"
    r"(?P<devices>-?\d+)(?P<cores>\s*cores?(?:\s+of)?\b)?"
    r"(?:\s*[x×*]\s+|[x×*]|\s+)(?P<name>\S.*)"
)


def parse_shorthand(text: str) -> Cluster:
    """Return the cluster that the shorthand `text` describes.

    Raises:
        JobError: `text` has another form, names an unknown device, or has impossible sizes.
    """
    parts = [_split(part) for part in _PART_SEPARATOR.split(text.strip())]
    networks = {nics for _, nics in parts if nics is not None}
    if len(networks) > 1 and any(nics is None for _, nics in parts):
        raise JobError(
            f"'{text}': some parts have a network and some have none",
            "give one network for all parts, or one for each part",
        )
    shared_network = next(iter(networks), None)
    return Cluster(tuple(_node(nodes_text, nics or shared_network) for nodes_text, nics in parts))


def is_shorthand(text: str) -> bool:
    """Return True if `text` begins like a cluster shorthand rather than naming a device or a file."""
    return _NODES_PATTERN.match(text.strip()) is not None


def _split(part: str) -> tuple[str, Nics | None]:
    nodes_text, *network = (piece.strip() for piece in part.split(","))
    if len(network) > 1:
        raise JobError(
            f"'{part}' has {len(network)} networks",
            f"give at most one network per part: '{SHORTHAND_EXAMPLE}'",
        )
    return nodes_text, parse_nics(network[0]) if network else None


def _node(text: str, nics: Nics | None) -> NodeGroup:
    match = _NODES_PATTERN.fullmatch(text)
    if match is None:
        raise JobError(
            f"'{text}' does not describe a cluster",
            f"write NODESxDEVICES NAME, NETWORK, such as '{SHORTHAND_EXAMPLE}', or give the path of a "
            "cluster file",
        )
    kind = require_device_kind(match["name"])
    nics = nics or default_nics(kind)
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    if not 1 <= nodes <= MAX_NODES:
        raise JobError(f"'{text}': the number of nodes must be 1 to {MAX_NODES:,}")
    max_devices = MAX_CORES if match["cores"] else MAX_SOCKETS if kind.kind == "cpu" else MAX_DEVICES
    if not 1 <= devices <= max_devices:
        raise JobError(f"'{text}': the number of devices or cores of a node must be 1 to {max_devices:,}")
    if match["cores"]:
        if kind.kind != "cpu":
            raise JobError(
                f"'{text}': {kind.name} is not a processor", f"write '{nodes}x{devices} {kind.name}'"
            )
        memory_bytes = max(devices * kind.memory_bytes // kind.cores, 1)
        node = build_node_group(kind, nodes, nics=nics, cores=devices, memory_bytes=memory_bytes)
    else:
        node = build_node_group(kind, nodes, devices, nics=nics)
    if nodes > 1 and not node.network:
        raise JobError(f"'{text}': the network is unknown", "append the NICs of one node: ', 1x25G'")
    return node
