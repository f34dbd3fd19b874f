"""Child process that runs `prepare_job_data` (`python -m wanma.data.text.preparation_process`).

The section comes in as JSON; progress and an error, if any, go out as one JSON object per line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from wanma.data.text.corpus import build_token_files
from wanma.job.errors import WanmaError
from wanma.job.sections.data import DataSection


def prepare_in_subprocess(section: DataSection, progress: Callable[[int, int], None] | None) -> None:
    """Build token files in a child process, so that its threads end with it."""
    command = [sys.executable, "-m", "wanma.data.text.preparation_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(section.model_dump_json() + "\n")
            child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise WanmaError(*message["error"])
                if progress is not None:
                    progress(*message["progress"])
            code = child.wait()
        finally:
            child.kill()
    if code:
        raise WanmaError(f"the data preparation process exited with code {code}", "see its message above")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; our parent decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    section = DataSection.model_validate_json(sys.stdin.readline())
    try:
        build_token_files(
            section,
            lambda processed, total: print(
                json.dumps({"progress": [processed, total]}), file=answers, flush=True
            ),
        )
    except WanmaError as error:
        print(json.dumps({"error": [error.message, error.hint, error.exit_code]}), file=answers, flush=True)


if __name__ == "__main__":
    main()
