"""Run that a benchmark gives to an engine: its processes are not descendants of this one.

They run on hosts of ssh, or are started by Slurm. Slurm's runs outlive the command that shows them.
"""

from __future__ import annotations

import contextlib
import socket

from wanma.engines.engine_record import EngineRecord, read_engine_record
from wanma.engines.selection import get_engine
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory

UNKNOWN_HOSTS = ("hosts of the engine",)
"""Names of the hosts of a run whose engine does not tell them."""


class SubmittedRun:
    """Run in the hands of an engine.

    Args:
        run: run directory; it has a record of the engine once the run is submitted.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def outlives_its_command(self) -> bool:
        """Return True if the run goes on when the command ends that shows it."""
        record = self._record()
        return record is not None and not get_engine(record.engine).ends_with_caller

    def stop(self, *, is_immediate: bool) -> None:
        """Ask the engine to end the run, in order or at once; nothing happens if it was never submitted.

        Raises:
            WanmaError: the engine does not answer.
        """
        record = self._record()
        if record is not None:
            get_engine(record.engine).cancel(record.handle, is_immediate=is_immediate)

    def other_hosts(self) -> tuple[str, ...]:
        """Return the hosts of the run, without this machine; empty if it was never submitted."""
        record = self._record()
        if record is None:
            return ()
        nodes: tuple[str, ...] = ()
        with contextlib.suppress(WanmaError):
            nodes = get_engine(record.engine).hosts(record.handle)
        own = socket.gethostname().partition(".")[0]
        return tuple(node for node in nodes or UNKNOWN_HOSTS if node.partition(".")[0] != own)

    def discard(self) -> None:
        """Remove the files of the ended run that only its hosts have; hosts that do not answer keep them."""
        record = self._record()
        if record is not None:
            with contextlib.suppress(WanmaError):
                get_engine(record.engine).discard(record.handle)

    def _record(self) -> EngineRecord | None:
        return read_engine_record(self._run)
