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

from wanma.elastic.workers.signal_dispositions import hear
from wanma.elastic.workers.torchrun_variables import set_variables
from wanma.elastic.workers.worker_output import ending_line
from wanma.job.errors import ScriptExitError, WanmaError
from wanma.job.run.worker import Worker, current_worker, in_session, launched_cluster


def run_script(worker: Worker, payload: bytes) -> None:
    """Run the script on one rank as `__main__`, with its own arguments and folder.

    Args:
        payload: JSON of `script` (a path, or a module's name if `is_module`), `arguments`, `cluster`,
            `run_id`, `max_restarts`, `local_rank_option` and `unset`, names of variables hidden from the
            script.
    """
    order = json.loads(payload)
    script: str = order["script"]
    current_worker.set(worker)
    launched_cluster.set(order["cluster"])
    set_variables(os.environ, worker, order["run_id"], order["max_restarts"])
    for name in order["unset"]:
        os.environ.pop(name, None)
    option = order["local_rank_option"]
    local_rank = [f"{option}={worker.local_rank}"] if option else []
    sys.argv = [script, *local_rank, *order["arguments"]]
    hear()
    try:
        _run(script, order)
    except SystemExit as leaving:
        if leaving.code not in (None, 0) and not _was_asked_to(worker, leaving):
            code = leaving.code if isinstance(leaving.code, int) else 1
            why = f"exit code {code}" if isinstance(leaving.code, int) else str(leaving.code)
            raise ScriptExitError(f"{_name(order)} ended itself: {why}", code) from leaving
    except BaseException as error:
        if not _was_asked_to(worker, error):
            raise
        print(ending_line(worker.rank), flush=True)
        traceback.print_exc()


def _run(script: str, order: Mapping[str, Any]) -> None:
    if order["is_module"]:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(script).resolve().parent))
    # Unlike runpy's, this module stays in sys.modules, for threads that outlive the script's last line.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _name(order: Mapping[str, Any]) -> str:
    return str(order["script"]) if order["is_module"] else Path(order["script"]).name


def _was_asked_to(worker: Worker, error: BaseException) -> bool:
    """Return True if the script ends because it was asked to stop: its exception is then no failure."""
    return worker.control.stop_requested() and not in_session.get() and not isinstance(error, WanmaError)
