"""Cluster shorthand: a cluster in one line, '8x8 H100 SXM, 4x100G + 16x8 A100 40GB'.

Every part is NODES x DEVICES NAME, then the network cards of one node. A network that is given once
holds for all parts; where none is given, the cards are those of the device's reference server.
`str(cluster)` prints the same form, longer: '8 nodes of 8 × H100 SXM, 4 × 100G'.
"""

from __future__ import annotations

import re

from wanma.hardware.catalogue.lookup import named
from wanma.hardware.cluster_file.node_builder import (
    MOST_CORES,
    MOST_DEVICES,
    MOST_NODES,
    MOST_SOCKETS,
    Cards,
    machines,
    read_cards,
    usual_cards,
)
from wanma.job.cluster import Cluster, Node
from wanma.job.errors import JobError

EXAMPLE = "8x8 H100 SXM, 4x100G + 16x8 A100 40GB"

# A part begins with a number: the + in 'Xeon 8480+' separates nothing. A negative number is parsed
# so that it can be rejected.
_PLUS = re.compile(r"\s*\+\s*(?=\d)")
_MACHINES = re.compile(
    r"(?:(?P<nodes>-?\d+)\s*(?:nodes?\s+of\s|[x×*])\s*)?"
    r"(?P<devices>-?\d+)(?P<cores>\s*cores?(?:\s+of)?\b)?"
    r"(?:\s*[x×*]\s+|[x×*]|\s+)(?P<name>\S.*)"
)


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that the shorthand `text` describes.

    Raises:
        JobError: `text` has another form, names an unknown device, or has impossible sizes.
    """
    parts = [_split(part) for part in _PLUS.split(text.strip())]
    given = {cards for _, cards in parts if cards is not None}
    if len(given) > 1 and any(cards is None for _, cards in parts):
        raise JobError(
            f"'{text}': some parts have a network and some have none",
            "give one network for all parts, or every part its own",
        )
    shared = next(iter(given), None)
    return Cluster(tuple(_node(what, cards or shared) for what, cards in parts))


def is_text(said: str) -> bool:
    """Return True if `said` begins like a cluster shorthand rather than naming a device or a file."""
    return _MACHINES.match(said.strip()) is not None


def _split(part: str) -> tuple[str, Cards | None]:
    what, *network = (piece.strip() for piece in part.split(","))
    if len(network) > 1:
        raise JobError(f"'{part}' has {len(network)} networks", f"a part has one: '{EXAMPLE}'")
    return what, read_cards(network[0]) if network else None


def _node(what: str, cards: Cards | None) -> Node:
    match = _MACHINES.fullmatch(what)
    if match is None:
        raise JobError(
            f"'{what}' describes no machines",
            f"write NODES x DEVICES NAME and then the network, e.g. '{EXAMPLE}'; or name a cluster file",
        )
    kind = named(match["name"])
    cards = cards or usual_cards(kind)
    nodes, devices = int(match["nodes"] or 1), int(match["devices"])
    if not 1 <= nodes <= MOST_NODES:
        raise JobError(f"'{what}': nodes must be 1 to {MOST_NODES:,}")
    most = MOST_CORES if match["cores"] else MOST_SOCKETS if kind.kind == "cpu" else MOST_DEVICES
    if not 1 <= devices <= most:
        raise JobError(f"'{what}': a node has 1 to {most:,} of them")
    if match["cores"]:
        if kind.kind != "cpu":
            raise JobError(f"'{what}': {kind.name} is no processor", f"write '{nodes}x{devices} {kind.name}'")
        memory_bytes = max(devices * kind.memory_bytes // kind.cores, 1)
        node = machines(kind, nodes, cards=cards, cores=devices, memory_bytes=memory_bytes)
    else:
        node = machines(kind, nodes, devices, cards=cards)
    if nodes > 1 and not node.network:
        raise JobError(f"'{what}': nothing is known of its network", "give the cards of one node: ', 1x25G'")
    return node
