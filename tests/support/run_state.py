"""State of a run that does not get on, for the message of a failed test: its processes and its logs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from wanma.elastic.workers.linux_processes import process_state
from wanma.job.run.run_directory import RunDirectory

LOG_CHARACTERS = 1500
"""Characters at the end of a log that count."""
COMMAND_CHARACTERS = 160


def describe_run(run: RunDirectory) -> str:
    """Return the ends of a run's logs: of its engine, of its ranks, and its metrics."""
    logs = [run.metrics]
    for folder in (run.engine_files, run.rank_log(0).parent):
        logs += sorted(folder.glob("*.log"))
    ends = [f"{path}:\n{_end(path)}" for path in dict.fromkeys(logs) if path.exists()]
    return "\n".join(ends) or f"{run.path} has no logs"


def describe_processes(processes: Iterable[int]) -> str:
    """Return a line for each process that lives: its state, its wait in the kernel, the locks it has open.

    A lock whose holder waits for the process that waits for the lock is seen here, and in no log.
    """
    return "\n".join(line for process in processes if (line := _process_line(process)))


def _process_line(process: int) -> str:
    folder = Path(f"/proc/{process}")
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        name, wait = (folder / "comm").read_text().strip(), (folder / "wchan").read_text()
        descriptors = list((folder / "fd").iterdir())
    except OSError:  # it has ended meanwhile
        return ""
    files = set()
    for descriptor in descriptors:
        with suppress(OSError):  # it is closed meanwhile
            files.add(str(descriptor.readlink()))
    locks = sorted(file for file in files if file.endswith(".lock"))
    state = process_state(process) or "runs or sleeps"
    text = f"process {process} ({name}), {state}, waits in {wait or '-'}"
    return f"{text}, open: {', '.join(locks) or 'no lock'}: {words[:COMMAND_CHARACTERS]}"


def _end(path: Path) -> str:
    return path.read_text(errors="replace")[-LOG_CHARACTERS:]
