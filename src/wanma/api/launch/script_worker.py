"""Rank entry point of `wanma launch`: runs the user's script as `python script.py` would.

It imports little: a script can no longer configure, by environment variables, modules that its process has
already loaded.
"""

from __future__ import annotations

import builtins
import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from wanma.elastic.workers.signal_dispositions import restore_stop_signals
from wanma.elastic.workers.torchrun_variables import set_torchrun_variables
from wanma.elastic.workers.worker_output import exception_line
from wanma.job.errors import ScriptExitError, WanmaError
from wanma.job.run.worker import WorkerContext, current_worker_context, in_session, launch_cluster_section


def run_script_worker(worker: WorkerContext, payload: bytes) -> None:
    """Run the script on one rank as `__main__`, with its own arguments and folder.

    Args:
        payload: JSON of `script` (a path, or a module's name if `is_module`), `arguments`, `cluster`,
            `run_id`, `max_restarts`, `local_rank_option` and `unset`, names of variables hidden from the
            script.
    """
    order = json.loads(payload)
    script: str = order["script"]
    current_worker_context.set(worker)
    launch_cluster_section.set(order["cluster"])
    set_torchrun_variables(os.environ, worker, order["run_id"], order["max_restarts"])
    for name in order["unset"]:
        os.environ.pop(name, None)
    option = order["local_rank_option"]
    local_rank = [f"{option}={worker.local_rank}"] if option else []
    sys.argv = [script, *local_rank, *order["arguments"]]
    restore_stop_signals()
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


def _execute(script: str, spec: Mapping[str, Any]) -> None:
    if spec["is_module"]:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(script).resolve().parent))
    # Unlike runpy's, this module stays in sys.modules, for threads that outlive the script's last line.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _script_name(spec: Mapping[str, Any]) -> str:
    return str(spec["script"]) if spec["is_module"] else Path(spec["script"]).name


def _is_requested_stop(worker: WorkerContext, error: BaseException) -> bool:
    """Return True if the script ends because it was asked to stop: its exception is then no failure."""
    return (
        worker.supervisor_client.is_drain_requested()
        and not in_session.get()
        and not isinstance(error, WanmaError)
    )
