"""Action `wanma bench collectives`: time and bandwidth of collectives between ranks."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import (
    add_cluster_override_option,
    add_rendezvous_options,
    parse_integers,
    parse_names,
)
from wanma.cli.bench.arguments import cluster_overrides
from wanma.cli.output import print_progress

_EXAMPLES = """\
examples:
  wanma bench collectives                                         # 2, 4 ... ranks of this node
  wanma bench collectives --ranks 4 --collectives all_reduce --sizes 1K..64M
  wanma bench run -- wanma bench collectives --ranks 2 --figures  # a result to keep and compare
  wanma bench collectives --nodes 2 --rendezvous 10.0.0.1:29500   # the same on each node

Bandwidths are bus bandwidths by the definitions of nccl-tests; the limit is measured in the same run.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    collectives = actions.add_parser(
        "collectives", help="measure time and bandwidth by collective, algorithm and size", epilog=_EXAMPLES
    )
    collectives.add_argument(
        "--ranks",
        metavar="N,N",
        type=parse_integers,
        help="numbers of ranks, on one node; default: 2, 4 ... to its GPUs or cores",
    )
    collectives.add_argument(
        "--sizes", metavar="SIZES", help="message sizes, such as 1K..64M or 4K,1M; default: 1K..256M"
    )
    collectives.add_argument(
        "--collectives", metavar="NAME,NAME", type=parse_names, default=[], help="collectives; default: all"
    )
    collectives.add_argument(
        "--algorithms",
        metavar="NAME,NAME",
        type=parse_names,
        default=[],
        help="algorithms, such as backend,ring; default: all",
    )
    collectives.add_argument(
        "--dtypes", metavar="NAME,NAME", type=parse_names, default=[], help="data types; default: fp32"
    )
    collectives.add_argument(
        "--seconds", metavar="N", type=float, help="seconds per number of ranks; default: 60"
    )
    collectives.add_argument(
        "--figures", action="store_true", help="print each time as a line that `wanma bench run` reads"
    )
    collectives.add_argument(
        "--nodes", metavar="N", help="number of nodes; run the same command on each (cluster.nodes)"
    )
    add_rendezvous_options(collectives)
    add_cluster_override_option(collectives)
    collectives.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.collectives.benchmark import DEFAULT_SECONDS, bench_collectives
    from wanma.bench.collectives.results import figure_lines
    from wanma.bench.collectives.selection import DEFAULT_SIZES
    from wanma.bench.collectives.terminal_tables import results_tables
    from wanma.cli.output import print_content

    sweeps = bench_collectives(
        ranks=arguments.ranks or (),
        sizes=DEFAULT_SIZES if arguments.sizes is None else arguments.sizes,
        collectives=arguments.collectives,
        algorithms=arguments.algorithms,
        dtypes=arguments.dtypes,
        seconds=DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds,
        overrides=cluster_overrides(arguments),
        progress=print_progress,
    )
    if not sweeps:
        print("measurement complete; results are shown on the node of rank 0")
        return 0
    print_content(results_tables(sweeps))
    if arguments.figures:
        print("\n".join(figure_lines(sweeps)))
    return 0
