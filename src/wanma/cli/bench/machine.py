"""Action `wanma bench machine`: limits of this machine, or of several nodes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import (
    add_cluster_override_option,
    add_rendezvous_options,
    parse_count,
    parse_integers,
    parse_names,
)
from wanma.cli.bench.arguments import (
    add_result_options,
    cluster_overrides,
    disturbance_limits,
    measure_result,
)
from wanma.cli.output import print_progress

if TYPE_CHECKING:
    from wanma.engines.launchers.launcher_placement import LauncherPlacement

_EXAMPLES = """\
examples:
  wanma bench machine                                    # one rank, and one for each GPU or core
  wanma bench machine --ranks 8 --parts links,collectives
  wanma bench machine --ranks 4 --collectives all_reduce --sizes 1K..64M
  wanma bench machine --save                             # also calibrates the forecasts of this node
  srun -N2 --ntasks-per-node=1 wanma bench machine       # the nodes of an allocation
  wanma bench machine --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29500   # the same on each node, its rank

Rates are those of one rank while all work at once. Links and devices slower than the others of their kind are
named. An execution that other programs disturb is repeated.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "machine", help="measure the limits of this machine, and name what is slow", epilog=_EXAMPLES
    )
    parser.add_argument(
        "--ranks",
        metavar="N,N",
        type=parse_integers,
        help="numbers of ranks on a node; default: 1, and its GPUs or cores; with --save 1, 2, 4 ...",
    )
    parser.add_argument(
        "--parts",
        metavar="NAME,NAME",
        type=parse_names,
        default=[],
        help="compute, memory, framework, links, collectives, storage; default: all, or collectives where "
        "the next options select some",
    )
    parser.add_argument(
        "--sizes",
        metavar="SIZES",
        help="message sizes of collectives, such as 1K..64M or 4K,1M",
    )
    parser.add_argument(
        "--collectives", metavar="NAME,NAME", type=parse_names, default=[], help="collectives; default: all"
    )
    parser.add_argument(
        "--algorithms",
        metavar="NAME,NAME",
        type=parse_names,
        default=[],
        help="algorithms of collectives, such as backend,ring; default: all",
    )
    parser.add_argument("--rounds", metavar="N", type=parse_count, help="executions of each; default: 5")
    parser.add_argument("--seconds", metavar="N", type=float, help="duration of one execution; default: 20")
    parser.add_argument(
        "--folder", metavar="DIR", type=Path, help="folder of the storage to measure; default: runs"
    )
    parser.add_argument("--save", action="store_true", help="save a calibration for forecasts of this node")
    parser.add_argument("--nodes", metavar="N", help="number of nodes; run it on each (cluster.nodes)")
    add_rendezvous_options(parser)
    add_cluster_override_option(parser)
    add_result_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.engines.launchers.node_leader import run_on_node
    from wanma.engines.launchers.placement import read_placement

    placement = read_placement()
    return run_on_node(placement, lambda: _measure(arguments, placement))


def _measure(arguments: argparse.Namespace, placement: LauncherPlacement | None) -> int:
    from wanma.bench.machine.calibration import check_savable
    from wanma.bench.machine.collective_selection import CollectiveSelection
    from wanma.bench.machine_benchmark import (
        DEFAULT_ROUNDS,
        DEFAULT_SECONDS,
        follow_executions,
        launched_overrides,
        machine_suite,
        node_role,
        save_machine_calibration,
    )
    from wanma.bench.meter.disturbance import NO_LIMITS
    from wanma.planner.hardware_model.calibration import load_calibration

    overrides = cluster_overrides(arguments)
    ranks = arguments.ranks or ()
    if placement is not None:
        overrides = launched_overrides(overrides, placement)
        ranks = ranks or ([placement.local_world_size] if placement.local_world_size > 1 else ())
    role = node_role(overrides)
    suite, rule = machine_suite(
        ranks=ranks,
        seconds=DEFAULT_SECONDS if arguments.seconds is None else arguments.seconds,
        parts=arguments.parts,
        folder=arguments.folder,
        overrides=overrides,
        rounds=DEFAULT_ROUNDS if arguments.rounds is None else arguments.rounds,
        calibrates=arguments.save,
        selection=CollectiveSelection.parse(arguments.sizes, arguments.collectives, arguments.algorithms),
    )
    if arguments.save:
        check_savable(suite.contenders[0].settings)
        load_calibration()  # a damaged one is reported before the work
    if role == "follower":
        follow_executions(suite, rule, print_progress)
        print("measurement complete; the result is on the node of rank 0")
        return 0
    limits = disturbance_limits(rule, arguments)
    if role == "leader":  # the other nodes count on as many executions, all in this command
        limits, arguments.fresh = NO_LIMITS, True
    directory, exit_code = measure_result(suite, rule, arguments, limits)
    if arguments.save:
        print(f"saved to {save_machine_calibration(directory.read(), overrides)}")
    return exit_code
