"""Process that encodes documents for `tokenization.py`.

Started as `python -m wanma.data.text.tokenization_process FOLDER HASH`.

One JSON request per line comes in, one JSON answer goes out; it ends with its input, so that it never
outlives the process that started it by more than one request.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from wanma.data.text.encoding_task import ReadingSettings, run_task
from wanma.data.text.task_json import task_from_json
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.errors import WanmaError


def main(folder: str, fingerprint: str) -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the whole group or job; our parent decides
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    tokenizer = load_tokenizer(Path(folder))
    assert tokenizer.fingerprint == fingerprint
    for line in sys.stdin:
        print(json.dumps(_handle_request(json.loads(line), tokenizer)), file=answers, flush=True)


def _handle_request(request: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    task, settings = task_from_json(request["task"]), ReadingSettings(**request["settings"])
    try:
        return {"result": run_task(task, tokenizer, Path(request["part"]), settings).to_json()}
    except WanmaError as error:
        return {"error": [error.message, error.hint, error.exit_code]}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror]}


if __name__ == "__main__":
    main(*sys.argv[1:])
