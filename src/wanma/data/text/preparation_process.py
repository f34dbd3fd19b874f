"""Child process that runs `prepare_job_data` (`python -m wanma.data.text.preparation_process`).

The section comes in as a line of JSON; progress and an error, if any, go out as one JSON object per line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from wanma.data.text.corpus import (
    build_token_files,
    load_job_tokenizer,
    preparation_of,
    resolve_text_sources,
)
from wanma.job.errors import WanmaError
from wanma.job.forecast.data_feed import TextPreparation
from wanma.job.sections.data import DataSection

_MEASURE, _ANNOUNCE = "--measure", "--announce"
"""Arguments of a process that measures and prepares nothing, and of one that measures before it prepares."""


def prepare_in_subprocess(
    section: DataSection,
    progress: Callable[[int, int], None] | None,
    announce: Callable[[TextPreparation], None] | None = None,
) -> None:
    """Build token files in a child process, so that its threads end with it.

    Args:
        section: the job's `[data]`.
        progress: called with (bytes done, bytes in all).
        announce: called before it begins, with what is to be prepared.
    """
    command = [sys.executable, "-m", "wanma.data.text.preparation_process"]
    if announce is not None:
        command.append(_ANNOUNCE)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(f"{section.model_dump_json()}\n")
            child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise WanmaError(*message["error"])
                if "preparation" in message:
                    if announce is not None:
                        announce(TextPreparation.from_json(message["preparation"]))
                elif progress is not None:
                    progress(*message["progress"])
            code = child.wait()
        finally:
            child.kill()
    if code:
        raise WanmaError(f"the data preparation process exited with code {code}", "see its message above")


def measure_in_subprocess(section: DataSection, deadline_seconds: float) -> TextPreparation:
    """Return the preparation that a job's text needs, measured in a child process.

    Raises:
        WanmaError: the text is missing or cannot be read, or its store did not answer in time.
    """
    command = [sys.executable, "-m", "wanma.data.text.preparation_process", _MEASURE]
    try:
        child = subprocess.run(
            command,
            input=f"{section.model_dump_json()}\n",
            capture_output=True,
            text=True,
            timeout=deadline_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise WanmaError(
            f"the store did not answer within {deadline_seconds:g} s; data.probe_store=false asks it nothing"
        ) from None
    for line in child.stdout.splitlines():
        message = json.loads(line)
        if "error" in message:
            raise WanmaError(*message["error"])
        return TextPreparation.from_json(message["preparation"])
    raise WanmaError(f"the measuring process exited with code {child.returncode}: {child.stderr[-300:]}")


def main(*arguments: str) -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the whole group or job; our parent decides
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    section = DataSection.model_validate_json(sys.stdin.readline())

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        texts, tokenizer = resolve_text_sources(section), load_job_tokenizer(section)
        if arguments:
            answer(preparation=asdict(preparation_of(section, texts, tokenizer)))
        if _MEASURE not in arguments:
            build_token_files(
                section,
                texts,
                tokenizer,
                lambda processed, total: answer(progress=[processed, total]),
            )
    except WanmaError as error:
        answer(error=[error.message, error.hint, error.exit_code])


if __name__ == "__main__":
    main(*sys.argv[1:])
