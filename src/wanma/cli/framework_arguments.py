"""Arguments of `wanma launch` for scripts of other frameworks and of other environments."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from wanma.job.errors import JobError

if TYPE_CHECKING:
    from wanma.api.launch.script_launch import Framework


def add_framework_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `parse_framework` reads."""
    parser.add_argument(
        "--framework",
        choices=("torch", "tensorflow", "jax", "horovod", "mpi"),
        default="torch",
        help="framework of SCRIPT, whose variables its processes read; default: torch",
    )
    parser.add_argument(
        "--roles",
        metavar="ROLE=N,...",
        help="TensorFlow: roles of the ranks, e.g. chief=1,worker=3,ps=2,evaluator=1; default: all workers",
    )
    parser.add_argument(
        "--python",
        metavar="FILE",
        help="interpreter of SCRIPT, e.g. of an environment without wanma; default: that of wanma",
    )


def parse_framework(arguments: argparse.Namespace) -> tuple[Framework, str]:
    """Return the framework of the script, and the path of its interpreter (empty: wanma's own).

    Raises:
        JobError: the arguments do not fit together.
    """
    from wanma.api.launch.script_launch import Framework
    from wanma.api.launch.tasks import parse_roles

    name = arguments.framework
    if arguments.roles is not None and name != "tensorflow":
        raise JobError(
            f"wanma launch: --roles are TensorFlow's, and --framework is {name}",
            "add --framework tensorflow, or leave --roles out",
        )
    interpreter = shutil.which(arguments.python) if arguments.python else ""
    if interpreter is None:
        raise JobError(
            f"wanma launch: --python {arguments.python}: there is no such program",
            "give the interpreter of the script's environment, e.g. --python path/to/venv/bin/python",
        )
    roles = parse_roles(arguments.roles) if arguments.roles is not None else ()
    # Not resolved: the interpreter of a virtual environment is a link, whose place names the environment.
    return Framework(name, roles), str(Path(interpreter).absolute()) if interpreter else ""


def framework_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options as words of a command line, without those that have their default."""
    values = {"--roles": arguments.roles, "--python": arguments.python}
    if arguments.framework != "torch":
        values["--framework"] = arguments.framework
    return [f"{option}={value}" for option, value in values.items() if value]


def count_ranks(framework: Framework, nodes: str) -> int | None:
    """Return the ranks of each node that the roles ask for; None: they do not say."""
    number = int(nodes) if nodes.isdecimal() and int(nodes) else 1
    ranks, rest = divmod(len(framework.roles), number)
    return ranks if ranks and not rest else None
