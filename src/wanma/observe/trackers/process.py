"""Process of a run's trackers: `python -m wanma.observe.trackers.process RUN NAME …`.

It reads the records of the run, so that a tracker that is slow or dead costs the training nothing. The end of
its standard input is the end of the run, however that came.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wanma.job.errors import JobError
from wanma.job.file.loading import load_recorded_job
from wanma.job.file.serialization import setting_texts
from wanma.job.run.run_directory import RunDirectory
from wanma.observe.trackers.feed import Feed
from wanma.observe.trackers.tracker import find_tracker

LOG = "trackers.log"
"""File in the folder of logs that has what trackers say."""
END_SECONDS = 5.0
"""Time that the end of a run waits for its trackers."""


class TrackerProcess:
    """Process of the trackers that `check_trackers` has accepted, as the run's supervisor sees it."""

    def __init__(self, run: RunDirectory, names: Sequence[str]) -> None:
        self._names = names
        log = run.path / "logs" / LOG
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(run.path), *names],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._log = log

    def close(self, warn: Callable[[str], object]) -> None:
        """Tell the process that the run has ended; it goes on alone if it has not written all."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            warn(f"{', '.join(self._names)}: records are still being written, see {self._log}")


def main(arguments: Sequence[str]) -> int:
    """Feed the trackers until the run has ended and all has arrived."""
    folder, *names = arguments
    run, end = RunDirectory(Path(folder)), threading.Event()
    settings = _settings(run)
    feeds = [Feed(name, find_tracker(name), run, settings, end, _say) for name in names]
    threads = [threading.Thread(target=feed.run, daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    while sys.stdin.buffer.read(1 << 10):
        pass
    end.set()
    for thread in threads:
        thread.join()
    return 0


def _settings(run: RunDirectory) -> dict[str, str]:
    """Return the keys of the job with their values; empty where it cannot be read."""
    try:
        return setting_texts(load_recorded_job(run.job))
    except JobError as error:
        _say(str(error))
        return {}


def _say(text: str) -> None:
    print(time.strftime("%Y-%m-%d %H:%M:%S"), f"[{os.getpid()}]", text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
