"""Cluster with the links between nodes as `wanma bench machine` measured them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from statistics import median

from wanma.bench.machine.machine_result import is_machine_result, node_count, rank_count
from wanma.bench.machine_report.slow_parts import find_slow_parts, parse_pair
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.job.cluster import Cluster, InterconnectLevel, NodeGroup
from wanma.job.errors import EXIT_USAGE, WanmaError

Rates = dict[tuple[int, int], float]
"""Median over the executions by pair of nodes, the slower direction and pair of ranks."""


def measured_cluster(result: BenchmarkResult) -> Cluster:
    """Return the nodes of a machine result with the measured links between them.

    A node of which all links are slow is a group of its own, so that plans see it. A slow link between two
    other nodes is the rate of their group: a ring over it is as slow.

    Raises:
        WanmaError: the result is of one node, or of no machine.
    """
    several = [each for each in result.contenders if is_machine_result(result) and node_count(each) > 1]
    contender = several[0] if several else None
    bandwidths = _rates(result, contender, is_bandwidth=True) if contender is not None else {}
    if contender is None or not bandwidths:
        raise WanmaError(
            f"{result.id} has no links between nodes",
            "measure them: wanma bench machine --nodes N on each node, with links among its --parts",
            EXIT_USAGE,
        )
    latencies = _rates(result, contender, is_bandwidth=False)
    (node,) = Cluster.from_json(result.hardware["cluster"]).nodes
    nodes = range(node_count(contender))
    slow_nodes, slow_pairs = _slow(result, contender)
    others = [number for number in nodes if number not in slow_nodes]
    usual = _between(bandwidths, others)
    named = {pair: rate for pair, rate in usual.items() if pair in slow_pairs}
    bandwidth = min(named.values()) if named else median((usual or bandwidths).values())
    latency = median((_between(latencies, others) or latencies).values())
    fastest = max(bandwidths.values())
    groups = [_with_link(node, "nodes", len(others), bandwidth, latency, fastest)]
    for number in sorted(slow_nodes):
        own = [rate for pair, rate in bandwidths.items() if number in pair]
        own_latency = median(rate for pair, rate in latencies.items() if number in pair)
        groups.append(_with_link(node, f"node {number}", 1, median(own), own_latency, fastest))
    return Cluster(tuple(groups))


def _rates(result: BenchmarkResult, contender: ContenderRecord, *, is_bandwidth: bool) -> Rates:
    ranks_per_node = rank_count(contender) // node_count(contender)
    found: Rates = {}
    for name, values in result.values.get(contender.name, {}).items():
        pair = parse_pair(name)
        if pair is None or pair.is_bandwidth != is_bandwidth or not values:
            continue
        first, second = sorted(rank // ranks_per_node for rank in pair.ranks)
        if first != second:
            rate = median(values.values())
            known = found.get((first, second), rate)
            found[first, second] = min(known, rate) if is_bandwidth else max(known, rate)
    return found


def _slow(result: BenchmarkResult, contender: ContenderRecord) -> tuple[set[int], set[tuple[int, int]]]:
    """Return the nodes of which all links are slow, and the other pairs of nodes with a slow link."""
    ranks_per_node = rank_count(contender) // node_count(contender)
    nodes, pairs = set[int](), set[tuple[int, int]]()
    for report in find_slow_parts(result):
        for finding in report.findings if report.contender == contender.name else ():
            if not finding.kind.is_link or not finding.kind.higher_is_better:
                continue
            ends = [sorted(end // ranks_per_node for end in ranks) for ranks in finding.ratios]
            between = {(first, second) for first, second in ends if first != second}
            if finding.rank is None:
                pairs |= between
            elif between:
                nodes.add(finding.rank // ranks_per_node)
    return nodes, {pair for pair in pairs if not nodes & set(pair)}


def _between(rates: Rates, nodes: Collection[int]) -> Rates:
    return {pair: rate for pair, rate in rates.items() if set(pair) <= set(nodes)}


def _with_link(
    node: NodeGroup, name: str, count: int, bandwidth: float, latency: float, fastest: float
) -> NodeGroup:
    """Return `count` nodes with a measured link.

    A level counts one device while all of its node send at once, and a pair was measured alone. So where the
    cards of a node are known, their share for each device is scaled by the pair's rate over the fastest one.
    """
    devices = len(node.devices) or 1
    if node.devices and node.nic_bytes_per_second is not None and node.nics:
        rate = node.nics * node.nic_bytes_per_second / devices * bandwidth / fastest
    else:
        rate = bandwidth / devices
    level = InterconnectLevel("network, measured", float(f"{rate:.3g}"), float(f"{latency:.3g}"))
    return replace(node, name=name, count=count, network=(level,))
