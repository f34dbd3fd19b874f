"""Process that encodes documents for `tokenization.py`: a task is a request, its result the answer.

A new interpreter is started as `python -m wanma.data.text.tokenization_process FOLDER HASH`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wanma.data.text.encoding_task import ReadingSettings, run_task
from wanma.data.text.task_json import task_from_json
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.run.child_process import Message, serve_parent


def serve_tasks(tokenizer: Tokenizer, requests: Iterator[Message], answer: Callable[[Message], None]) -> None:
    """Encode the tasks that the parent sends."""
    tokenizer.speed_up()
    for request in requests:
        answer(_handle_request(request, tokenizer))


def main(folder: str, fingerprint: str) -> None:
    def serve(requests: Iterator[Message], answer: Callable[[Message], None]) -> None:
        tokenizer = load_tokenizer(Path(folder))
        assert tokenizer.fingerprint == fingerprint
        serve_tasks(tokenizer, requests, answer)

    serve_parent(serve)


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
