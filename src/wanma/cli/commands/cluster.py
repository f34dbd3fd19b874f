"""`wanma cluster`: the machines as a cluster file, and the catalogue of devices."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from wanma.cli.arguments import complete_with, job_files

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLES = """\
examples:
  wanma cluster                                       this machine
  wanma cluster "8x8 H100 SXM, 4x100G" > cluster.toml   a file to edit
  wanma plan JOB.toml --cluster cluster.toml            plan for it
  wanma cluster --devices                             what can be named
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("cluster", help="the machines, as a cluster file", epilog=_EXAMPLES)
    where = parser.add_argument(
        "where", metavar="CLUSTER", nargs="?", help="cluster file, or one line; default: what is here"
    )
    complete_with(where, job_files)
    parser.add_argument("--devices", action="store_true", help="list the catalogue of devices")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.cli.show import show
    from wanma.hardware.cluster_file import read_cluster
    from wanma.hardware.cluster_toml import to_toml
    from wanma.hardware.discover import discover

    if arguments.devices:
        show(_catalogue())
    else:
        print(to_toml(discover() if arguments.where is None else read_cluster(arguments.where)), end="")
    return 0


def _catalogue() -> Table:
    from rich.table import Table

    from wanma.hardware.catalogue import CATALOGUE

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("device", "TFLOP/s bf16", "fp16", "fp8", "memory GB", "GB/s", "link", "GB/s each way", "W"):
        table.add_column(name, justify="left" if name in ("device", "link") else "right")
    for kind in CATALOGUE:
        peak = kind.peak_flops_per_second
        rates = [f"{peak[one] / 1e12:,.4g}" if one in peak else "–" for one in ("bf16", "fp16", "fp8")]
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
