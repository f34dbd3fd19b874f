"""Record of the script that `wanma launch` runs: script.json, read by `report.script_run`."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from wanma.elastic.coordinator.user_notices import RESTARTED_EVENT
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.job.run.worker import Event


class ScriptRecord:
    """Record of a script's run; its constructor and `record_end` write the file.

    Args:
        ranks: processes on each node.
        framework: framework of the script.
        tasks: task of each rank in the framework, such as 'ps 0'; empty if it knows none.
        start_timeout_seconds: longest time that the nodes wait for each other, before the first record of
            use.

    Raises:
        OSError: the run directory cannot be written to.
    """

    def __init__(
        self,
        run: RunDirectory,
        script: str,
        arguments: Sequence[str],
        ranks: int,
        nodes: int,
        *,
        framework: str = "torch",
        tasks: Sequence[str] = (),
        start_timeout_seconds: float = 0.0,
    ) -> None:
        self._run = run
        self._content: dict[str, Any] = {
            "script": script,
            "arguments": list(arguments),
            "ranks_per_node": ranks,
            "nodes": nodes,
            "framework": framework,
            "tasks": list(tasks),
            "command_line": sys.argv,
            "host": platform.node(),
            "process": os.getpid(),
            "started": time.time(),
            "start_timeout_seconds": start_timeout_seconds,
            "ended": None,
            "exit_code": None,
            "failure": "",
            "restarts": 0,
            "restarted_after": "",
        }
        write_json(run.script, self._content)

    def with_restart_records(self, write: Callable[[Event], None]) -> Callable[[Event], None]:
        """Return `write`, preceded by a record of each restart of the ranks."""

        def see(event: Event) -> None:
            if event["kind"] == RESTARTED_EVENT:
                restarts = self._content["restarts"] + 1
                self._content.update(restarts=restarts, restarted_after=event["failure"])
                with contextlib.suppress(OSError):  # the end is recorded once more
                    write_json(self._run.script, self._content)
            else:
                write(event)

        return see

    def record_end(self, exit_code: int, failure: str, write: Callable[[Event], None]) -> None:
        """Record the end of the script; if the file cannot be written, only `write` gets a warning."""
        self._content.update(ended=time.time(), exit_code=exit_code, failure=failure)
        try:
            write_json(self._run.script, self._content)
        except OSError as error:
            text = f"the end of the run was not recorded: {error.strerror or error}"
            write({"kind": "message", "level": "warning", "text": text})
