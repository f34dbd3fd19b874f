"""Command `wanma launch SCRIPT`: a user's own training script on several ranks."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.cli.arguments import (
    add_cluster_override_option,
    add_engine_options,
    add_rendezvous_options,
    override_texts,
    parse_integers,
)
from wanma.cli.framework_arguments import (
    add_framework_arguments,
    count_ranks,
    framework_options,
    parse_framework,
)
from wanma.cli.output import print_submitted
from wanma.cli.torchrun_arguments import add_torchrun_arguments, parse_ranks, read_torchrun_arguments
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.job.errors import JobError

if TYPE_CHECKING:
    from wanma.api.launch.script_launch import Program
    from wanma.job.sections.cluster import ClusterSection

_DESCRIPTION = """\
Run your own training script in several processes: plain Python, as for torchrun, for TensorFlow, JAX,
Horovod or MPI, or with wanma.session(...).

Options of `wanma launch` come before SCRIPT. Arguments after SCRIPT are passed to the script.
"""
_EXAMPLES = """\
examples:
  wanma launch --ranks 2 own_loop.py                           # an example: `wanma init own_loop` writes it
  wanma launch --ranks 2 --run-dir runs/first my_script.py --learning-rate 3e-4    # option of the script
  wanma launch --ranks 2 -m my_package.train                                       # a module
  wanma launch --ranks 8 --nodes 2 --rendezvous 10.0.0.1:29500 my_script.py        # on each node
  wanma launch --ranks 2 --set cluster.max_restarts=3 my_script.py                 # torchrun --max-restarts 3
  mpirun -n 4 wanma launch my_script.py                          # or srun: ranks and nodes are the launcher's
  wanma launch --framework jax --python jax/bin/python --ranks 2 my_script.py      # of another environment
  wanma launch --framework tensorflow --roles chief=1,worker=2,ps=1 my_script.py
  wanma launch --framework mpi --ranks 4 my_mpi4py_script.py       # connected by Open MPI's mpirun

Each process reads its rank from the variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...),
or from those of its framework: TF_CONFIG; JAX_PROCESS_ID, ...; HOROVOD_RANK, ...
With wanma.session, the same command resumes after a stop. Ctrl-C completes the step and saves a checkpoint; a
second Ctrl-C exits at once. Other scripts receive SIGINT, as from a terminal.
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "launch",
        help="run your own training script on several ranks",
        usage="wanma launch --ranks N [options] SCRIPT [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=parse_ranks,
        help="processes to start on this node (required without a launcher); auto: one per GPU, or CPU core",
    )
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="run directory; default: runs/SCRIPT")
    parser.add_argument(
        "--nodes", metavar="N", help="number of nodes; run the same command on each (cluster.nodes)"
    )
    add_engine_options(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show what would be started or submitted, with its devices and price; start nothing",
    )
    add_rendezvous_options(parser)
    add_cluster_override_option(parser)
    parser.add_argument(
        "--show",
        metavar="RANKS",
        type=_parse_shown_ranks,
        help="ranks with output on the console: all (default), none, or e.g. 0,3",
    )
    add_framework_arguments(parser)
    add_torchrun_arguments(parser)
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    for option in ("--local-rank", "--local_rank"):
        parser.add_argument(
            option,
            dest="local_rank_option",
            action="store_const",
            const=option,
            default="",
            help=f"pass {option}=N to each process, as torch.distributed.launch does",
        )
    parser.add_argument(
        "--use-env", "--use_env", action="store_true", help="pass the local rank by variables only (default)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="Python file, or a compiled program")
    arguments = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of the script"
    )
    arguments.required = False  # argparse would list it among what is missing
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.engines.launchers.node_leader import run_on_node
    from wanma.engines.launchers.placement import read_placement

    placement = read_placement()
    return run_on_node(placement, lambda: _launch(arguments, placement))


def _launch(arguments: argparse.Namespace, placement: LauncherPlacement | None) -> int:
    from wanma.engines.launchers.job_placement import reject_detach

    script: str = _find_script(arguments)
    if not arguments.module and not Path(script).is_file():
        raise JobError(
            f"there is no script {script}",
            "put options of wanma launch before SCRIPT; see `wanma launch --help`",
        )
    reject_detach(arguments.detach, placement)
    read_torchrun_arguments(arguments)
    framework, arguments.python = parse_framework(arguments)
    nodes = arguments.nodes or ("1" if placement is None else str(placement.nodes))
    if arguments.ranks is None:
        arguments.ranks = count_ranks(framework, nodes)
    ranks = _ranks(arguments, placement)
    _check_shown_ranks(arguments.show, ranks, nodes)
    overrides = [*arguments.set, *_cluster_overrides(arguments)]
    from wanma.api.launch.script_launch import Program, launch_script

    option = "" if arguments.use_env else arguments.local_rank_option
    program = Program(script, tuple(arguments.arguments), arguments.module, option, arguments.python)
    program.check_executable()
    has_engine = any(text.startswith("cluster.engine=") for text in overrides)
    if arguments.dry_run or arguments.detach or has_engine:
        from wanma.api.engines.placing import is_placed
        from wanma.job.file.cluster_overrides import parse_cluster_section

        section = parse_cluster_section(overrides, "wanma launch", "give keys of [cluster] only")
        is_started = placement is not None or is_placed(section)
        if (arguments.detach or section.engine != "local") and not is_started:
            return _submit(arguments, section, overrides)
        if arguments.dry_run:
            return _show_start(program, ranks, arguments.run_dir, section, placement)
    return launch_script(
        program,
        ranks,
        framework=framework,
        run_directory=arguments.run_dir,
        overrides=overrides,
        shown_ranks=arguments.show,
        placement=placement,
    )


def _find_script(arguments: argparse.Namespace) -> str:
    """Return the script of the command; that of a submitted run is in its code snapshot."""
    from wanma.engines.engine import CODE_ARCHIVE_VARIABLE

    if CODE_ARCHIVE_VARIABLE in os.environ:
        from wanma.api.engines.placing import enter_code_snapshot

        folder = enter_code_snapshot()
        if not arguments.module:
            return str(folder / arguments.script)
    return str(arguments.script)


def _script_in_folder(script: Path) -> str:
    """Return the script's path within the working directory, or the absolute path of one outside."""
    path = script.resolve()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _submit(arguments: argparse.Namespace, section: ClusterSection, overrides: list[str]) -> int:
    """Submit the script to its engine and, unless it is to be detached, show it until it ends."""
    from wanma.api.engines.attachment import attach
    from wanma.api.engines.script_submission import dry_script_submission, submit_script
    from wanma.engines.selection import get_engine

    name = arguments.script.rpartition(".")[2] if arguments.module else Path(arguments.script).stem
    words = [f"--ranks={arguments.ranks}", *(f"--set={text}" for text in overrides)]
    words += framework_options(arguments)
    words += ["-m"] if arguments.module else []
    if arguments.local_rank_option and not arguments.use_env:
        words.append(arguments.local_rank_option)
    words += [arguments.script if arguments.module else _script_in_folder(Path(arguments.script))]
    request = (name, [*words, *arguments.arguments], arguments.ranks, section, arguments.run_dir)
    if arguments.dry_run:
        from wanma.cli.output import print_content

        print_content(dry_script_submission(*request))
        return 0
    engine = get_engine(section.engine)
    is_held = engine.ends_with_caller and not arguments.detach
    run, record = submit_script(*request, engine=engine, is_held=is_held)
    if not arguments.detach:
        return attach(run, record, from_start=False, engine=engine, is_held=is_held)
    print_submitted(run, record.notes)
    return 0


def _show_start(
    program: Program,
    ranks: int,
    run_directory: Path | None,
    section: ClusterSection,
    placement: LauncherPlacement | None,
) -> int:
    """Print what would be started in the foreground."""
    from wanma.api.engines.script_submission import dry_script_run
    from wanma.cli.output import print_content
    from wanma.engines.launchers.job_placement import place_cluster

    if placement is not None:
        section = place_cluster(section, placement)
    print_content(dry_script_run(program.name, program.command, ranks, section, run_directory))
    return 0


def _ranks(arguments: argparse.Namespace, placement: LauncherPlacement | None) -> int:
    """Return the number of ranks on this node: by `--ranks`, or the processes that a launcher has started.

    Raises:
        JobError: there is none, or they differ.
    """
    launched = placement.local_world_size if placement is not None else 1
    ranks: int | None = arguments.ranks
    if ranks is None and launched > 1:
        return launched
    if ranks is None or ranks < 1:
        raise JobError(
            f"wanma launch: --ranks N, at least 1, is missing before {arguments.script}",
            f"for two processes: `wanma launch --ranks 2 {arguments.script}`",
        )
    if placement is not None and launched not in (1, ranks):
        raise JobError(
            f"wanma launch: --ranks {ranks}, and {placement.launcher} started {launched} processes on this "
            "node",
            f"omit --ranks, or let {placement.launcher} start one process per node",
        )
    return ranks


def _parse_shown_ranks(text: str) -> list[int] | None:
    """Parse the ranks of `--show`; None: all."""
    named: dict[str, list[int] | None] = {"all": None, "none": []}
    return named[text] if text in named else parse_integers(text)


def _check_shown_ranks(shown_ranks: list[int] | None, ranks: int, nodes: str) -> None:
    """Refuse ranks of `--show` that will not exist; on several nodes the number of ranks may change.

    Raises:
        JobError: names the first such rank.
    """
    for rank in shown_ranks or ():
        if rank < 0 or (nodes == "1" and rank >= ranks):
            raise JobError(
                f"wanma launch: --show {rank}: no such rank",
                f"ranks are 0 to {ranks - 1}; or give all or none" if nodes == "1" else "ranks begin at 0",
            )


def _cluster_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return options that are another form of a key as overrides, so that one place checks them."""
    written = {
        "cluster.engine": arguments.engine,
        "cluster.nodes": arguments.nodes,
        "cluster.rendezvous": arguments.rendezvous,
        "cluster.node_rank": arguments.node_rank,
        "cluster.max_restarts": arguments.max_restarts,
    }
    return override_texts(written)
