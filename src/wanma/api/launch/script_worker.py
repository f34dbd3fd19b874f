"""Rank entry point of `wanma launch`: runs the user's script as `python script.py` would.

It imports little: a script can no longer configure, by environment variables, modules that its process has
already loaded. A script of another interpreter, or a compiled program, replaces this process, and keeps its
number and its log.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

from wanma.api.launch import script_main
from wanma.api.launch.framework_variables import set_framework_variables
from wanma.api.launch.tasks import Task
from wanma.api.metric_log import METRICS_VARIABLE
from wanma.elastic.workers.signal_dispositions import restore_stop_signals
from wanma.elastic.workers.torchrun_variables import set_torchrun_variables
from wanma.elastic.workers.worker_output import exception_line
from wanma.hardware.discovery.network_interfaces import loopback_hostname
from wanma.job.errors import ScriptExitError, WanmaError
from wanma.job.file.import_path import code_folder
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext, current_worker_context, in_session, launch_cluster_section

_HOSTNAME_USERS = {"jax": "JAX on CPUs", "horovod": "Horovod"}
"""Frameworks whose processes connect to the address of a host's name, by their names here."""


def run_script_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the script on one rank as `__main__`, with its own arguments and folder.

    Args:
        payload: JSON of `script` (a path, or a module's name if `is_module`), `arguments`, `cluster`,
            `run_id`, `max_restarts`, `local_rank_option`, `framework`, `roles` (the role of each rank),
            `has_session` (True if the script records its steps by a session), `local_devices` (number of
            GPUs of this node), `interpreter` (of the script; empty: this one), `is_program` (True if the
            script is a program of its own), `mpi` (settings of the gang of MPI ranks, or None) and `unset`,
            names of variables hidden from the script.
    """
    order = json.loads(payload)
    script: str = order["script"]
    set_script_variables(os.environ, worker, order)
    for name in order["unset"]:
        os.environ.pop(name, None)
    option = order["local_rank_option"]
    local_rank = [f"{option}={worker.local_rank}"] if option else []
    arguments = [*local_rank, *order["arguments"]]
    if order["framework"] == "horovod" or (order["framework"] == "jax" and not order["local_devices"]):
        _check_hostname(worker, order["framework"])
    if order["mpi"] is not None:
        from wanma.api.launch.mpi_gang import MpiSettings, join_gang

        join_gang(worker, MpiSettings(**order["mpi"]))
    restore_stop_signals()
    if worker.supervisor_client.is_drain_requested():  # its signal came while this process ignored it
        return
    if order["is_program"]:
        _replace_process([script, *arguments])
    if order["interpreter"]:
        module = ["-m"] if order["is_module"] else []
        # A process of JAX that fails would wait 5 minutes for the others before it ends.
        runner = [script_main.__file__] if order["framework"] == "jax" else []
        _replace_process([order["interpreter"], *runner, *module, script, *arguments])
    if order["framework"] == "torch":
        current_worker_context.set(worker)
        launch_cluster_section.set(order["cluster"])
    sys.argv = [script, *arguments]
    try:
        _execute(script, order)
    except SystemExit as leaving:
        if leaving.code not in (None, 0) and not _is_requested_stop(worker, leaving):
            code = leaving.code if isinstance(leaving.code, int) else 1
            exit_text = f"exit code {code}" if isinstance(leaving.code, int) else str(leaving.code)
            raise ScriptExitError(f"{_script_name(order)} exited: {exit_text}", code) from leaving
    except BaseException as error:
        if not _is_requested_stop(worker, error):
            raise
        print(exception_line(worker.rank), flush=True)
        traceback.print_exc()


def set_script_variables(
    environment: MutableMapping[str, str], worker: WorkerContext, order: Mapping[str, Any]
) -> None:
    """Set the variables from which the script's framework reads the place of its process.

    Args:
        environment: variables to write to.
        worker: rank that runs the script.
        order: as in `run_script_worker`.
    """
    run = RunDirectory(worker.run_directory)
    is_main = worker.rank == 0 and not order["has_session"]
    environment[METRICS_VARIABLE] = str(run.metrics if is_main else run.rank_metrics(worker.rank))
    if order["framework"] == "torch":
        set_torchrun_variables(environment, worker, order["run_id"], order["max_restarts"])
    elif order["framework"] != "mpi":  # mpirun sets those
        tasks = Task.from_roles(order["roles"])
        set_framework_variables(environment, order["framework"], worker, tasks, order["local_devices"])


def _check_hostname(worker: WorkerContext, framework: str) -> None:
    """Warn, once per node, if other nodes cannot connect here: these frameworks use the host's name."""
    if worker.local_rank or worker.world_size == worker.local_world_size:
        return
    if found := loopback_hostname():
        text = (
            f"node {worker.node_rank}: {found[0]}, the name of this host, resolves to {found[1]}, which "
            f"other nodes cannot reach; collectives of {_HOSTNAME_USERS[framework]} connect to the address "
            "of that name: correct it in /etc/hosts"
        )
        worker.supervisor_client.send_event({"kind": "message", "level": "warning", "text": text})


def _replace_process(command: list[str]) -> NoReturn:
    """Replace this process by `command`; lines of a Python program reach the log as they are printed."""
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"):
        os.environ.setdefault(name, "1")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and other programs would inherit that
    sys.stdout.flush()
    os.execvp(command[0], command)


def _execute(script: str, spec: Mapping[str, Any]) -> None:
    if spec["is_module"]:
        sys.path.insert(0, str(code_folder()))
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
    script_main.run_as_main(script, spec["is_module"])


def _script_name(spec: Mapping[str, Any]) -> str:
    return str(spec["script"]) if spec["is_module"] else Path(spec["script"]).name


def _is_requested_stop(worker: WorkerContext, error: BaseException) -> bool:
    """Return True if the script ends because it was asked to stop: its exception is then no failure."""
    return (
        worker.supervisor_client.is_drain_requested()
        and not in_session.get()
        and not isinstance(error, WanmaError)
    )
