"""Launcher of MPI on this node: where `mpirun` is, whose it is, and its command line and environment.

It connects ranks that wanma's supervisors start (`mpi_gang`): its own processes, one per rank, run
`mpi_process`. Sources: mpirun(1) of Open MPI 4.1, "Mapping, Ranking, and Binding", and `ompi_info --all`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wanma.api.launch import mpi_process
from wanma.job.errors import JobError, WanmaError

VERSION_SECONDS = 60.0
"""Deadline, in seconds, of `mpirun --version`."""
NODE_NAME_PREFIX = "wanma-node-"
"""Prefix of the names of the nodes for mpirun, before their node rank; its own node is localhost."""
_OPEN_MPI = re.compile(r"mpirun \(Open MPI\) (\d+)\.")
_RANK_COMMAND = f'exec "${mpi_process.PYTHON_VARIABLE}" -I -S "${mpi_process.PROGRAM_VARIABLE}" rank'
"""Shell command of mpirun's processes: interpreter and program are those of the node that runs it."""
_BINDING_VARIABLES = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")
"""Variables by which a user asks for a binding of the ranks to cores."""
_LAUNCH_PREFIXES = (
    "SLURM_",
    "PBS_",
    "LSB_",
    "FLUX_",
    "ORTE_",
    "PMI_",
    "PMIX_",
    "PRTE_",
    "OMPI_MCA_ess_",
    "OMPI_MCA_orte_",
    "OMPI_MCA_pmix_",
)
"""Prefixes of the variables of a batch system or an outer launcher: mpirun would start nodes by these."""
_ROOT_VARIABLES = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
    "PRTE_ALLOW_RUN_AS_ROOT",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM",
)
"""Variables without which Open MPI does not run as root."""
_USER_VARIABLES = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_MCA_", "PRTE_ALLOW_RUN_AS_ROOT")
"""Beginnings of the variables by which a user configures Open MPI."""


@dataclass(frozen=True)
class MpiLauncher:
    """Open MPI's mpirun on this node."""

    folder: str
    """Folder of the program, and of its daemon."""
    major_version: int


def find_mpi_launcher(interpreter: str, script: str, ranks: int) -> MpiLauncher:
    """Return Open MPI's mpirun: the one beside the interpreter, or else in PATH.

    Args:
        interpreter: Python of the script; empty: that of wanma.
        script: script that is to be started, for the message.
        ranks: number of its ranks, likewise.

    Raises:
        JobError: there is none, or it is another MPI's.
    """
    beside = Path(interpreter or sys.executable).parent
    path = shutil.which("mpirun", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if path is None:
        raise JobError(
            "wanma launch: --framework mpi: there is no mpirun, neither beside the interpreter nor in PATH",
            "install Open MPI on each node (Debian: apt-get install openmpi-bin), or load its module "
            "(`module load openmpi`)",
        )
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
        text = (done.stdout + done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    if (match := _OPEN_MPI.search(text)) is None:
        first_line = text.partition("\n")[0] or "no output"
        raise JobError(
            f"wanma launch: --framework mpi: {path} is not Open MPI's: "
            f"`mpirun --version` says {first_line!r}",
            f"put Open MPI's first in PATH, or let the other one start the script: `mpirun -n {ranks} python "
            f"{script}`",
        )
    return MpiLauncher(str(Path(path).parent), int(match[1]))


def mpirun_command(launcher: MpiLauncher, local_world_sizes: Sequence[int]) -> list[str]:
    """Return the command that connects the ranks of all nodes, run on the first node.

    Args:
        launcher: the launcher.
        local_world_sizes: ranks of each node.

    Raises:
        WanmaError: mpirun could not run this interpreter for other nodes.
    """
    paths = (sys.executable, mpi_process.__file__)
    if len(local_world_sizes) > 1 and any(set(" :") & set(path) for path in paths):
        raise WanmaError(
            f"--framework mpi on several nodes: mpirun can run no program whose path has a space or a colon: "
            f"{' or '.join(paths)}",
            "install wanma in another folder, or use one node",
        )
    hosts = [
        f"{f'{NODE_NAME_PREFIX}{node}' if node else 'localhost'}:{size}"
        for node, size in enumerate(local_world_sizes)
    ]
    command = ["mpirun", "-n", str(sum(local_world_sizes)), "-H", ",".join(hosts), "--wdir", "/"]
    command += ["--map-by", "slot"]  # ranks of a node are consecutive
    command += ["--leave-session-attached"]  # a daemon in the background would leave its guard
    if not any(name in os.environ for name in _BINDING_VARIABLES):
        command += ["--bind-to", "none"]
    agent = f"{sys.executable} -I -S {mpi_process.__file__} remote"
    option, shell = ("--mca", "rsh") if launcher.major_version < 5 else ("--prtemca", "ssh")
    parameters = {
        "plm": shell,
        "plm_SHELL_agent": agent,
        "plm_SHELL_no_tree_spawn": "1",
        "plm_SHELL_pass_environ_mca_params": "0",  # each node has its own, such as its interface
    }
    for name, value in parameters.items():
        command += [option, name.replace("SHELL", shell), value]
    return [*command, "/bin/sh", "-c", _RANK_COMMAND]


def launcher_environment(
    environment: Mapping[str, str], launcher: MpiLauncher, interface: str | None
) -> dict[str, str]:
    """Return the environment of mpirun, or of its daemon on another node.

    Args:
        environment: environment of the node's first rank.
        launcher: the launcher.
        interface: network interface to the other nodes; None: there are none.
    """
    kept = {name: value for name, value in environment.items() if not _is_launch_variable(name)}
    if interface is not None:
        kept.setdefault("OMPI_MCA_oob_tcp_if_include", interface)
        kept.setdefault("PRTE_MCA_prte_if_include", interface)
    if os.geteuid() == 0:  # the script runs as root, too
        kept |= dict.fromkeys(_ROOT_VARIABLES, "1")
    kept["PATH"] = f"{launcher.folder}{os.pathsep}{kept.get('PATH', os.defpath)}"
    kept[mpi_process.PYTHON_VARIABLE] = sys.executable
    kept[mpi_process.PROGRAM_VARIABLE] = mpi_process.__file__
    return kept


def _is_launch_variable(name: str) -> bool:
    is_own = name.startswith("OMPI_") and not name.startswith(_USER_VARIABLES)
    is_prefixed = name.startswith(_LAUNCH_PREFIXES) and not name.startswith(("PRTE_MCA_", "PRTE_ALLOW"))
    return is_own or is_prefixed
