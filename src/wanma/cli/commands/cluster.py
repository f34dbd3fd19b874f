"""Command `wanma cluster`: the cluster as a file, and the catalogue of devices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from wanma.cli.arguments import complete_job_files, set_completer
from wanma.job.errors import JobError

if TYPE_CHECKING:
    from rich.table import Table

    from wanma.job.cluster import Cluster

_EXAMPLES = """\
examples:
  wanma cluster                                         # this node as a cluster file
  wanma cluster "8x8 H100 SXM, 4x100G" > cluster.toml   # a cluster file to edit
  wanma plan JOB.toml --cluster cluster.toml            # plan for it
  wanma cluster --measured RESULT > cluster.toml        # with links of `wanma bench machine --nodes N`
  wanma cluster --devices                               # names of devices
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("cluster", help="show a cluster", epilog=_EXAMPLES)
    argument = parser.add_argument(
        "where", metavar="CLUSTER", nargs="?", help="cluster file, or one line; default: this node"
    )
    set_completer(argument, complete_job_files)
    parser.add_argument("--devices", action="store_true", help="list the device catalogue")
    parser.add_argument(
        "--measured",
        metavar="RESULT",
        help="nodes of a result of `wanma bench machine --nodes N`, with their measured links",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.cli.output import print_content
    from wanma.hardware.cluster_file.export import export_cluster
    from wanma.hardware.cluster_file.reader import read_cluster
    from wanma.hardware.discovery.node import discover_node

    if arguments.devices:
        print_content(_catalogue_table())
        return 0
    if arguments.measured is not None:
        if arguments.where is not None:
            raise JobError("--measured and CLUSTER both give the nodes", "remove one of them")
        cluster = _read_measured(arguments.measured)
    else:
        cluster = discover_node() if arguments.where is None else read_cluster(arguments.where)
    print(export_cluster(cluster), end="")
    return 0


def _read_measured(name: str) -> Cluster:
    from wanma.bench.machine_report.measured_cluster import measured_cluster
    from wanma.bench.results.directory import find_result
    from wanma.cli.bench.arguments import RESULTS_FOLDER

    return measured_cluster(find_result(RESULTS_FOLDER, name).read())


def _catalogue_table() -> Table:
    from rich.table import Table

    from wanma.hardware.catalogue.lookup import CATALOGUE

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "device",
        "TFLOP/s bf16",
        "fp16",
        "fp8",
        "memory GB",
        "GB/s",
        "link",
        "GB/s per direction",
        "W",
    ):
        table.add_column(name, justify="left" if name in ("device", "link") else "right")
    for kind in CATALOGUE:
        peak = kind.peak_flops_per_second
        rates = [
            f"{peak[precision] / 1e12:,.4g}" if precision in peak else "–"
            for precision in ("bf16", "fp16", "fp8")
        ]
        bandwidth = kind.bandwidth_bytes_per_second
        table.add_row(
            kind.name,
            *rates,
            f"{kind.memory_bytes / 1e9:g}",
            f"{bandwidth / 1e9:,.4g}" if bandwidth else "–",
            kind.link.name if kind.link else "–",
            f"{kind.link.bandwidth_bytes_per_second / 1e9:,g}" if kind.link else "–",
            f"{kind.power_watts:g}" if kind.power_watts else "–",
        )
    return table
