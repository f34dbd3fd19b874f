"""Process that encodes documents for `tokenization.py`: a task is a request, its result the answer.

A new interpreter is started as `python -m wanma.data.text.tokenization_process FOLDER HASH`.
"""

from __future__ import annotations

import base64
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from wanma.data.text.encoding_task import EncodingTask, ReadingSettings, run_task
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.errors import WanmaError
from wanma.job.run.child_process import Message, serve_parent


def task_request(task: EncodingTask, part: Path, settings: ReadingSettings) -> Message:
    """Return the request to encode a task; arguments as of `run_task`."""
    return {"task": base64.b64encode(pickle.dumps((task, part, settings))).decode()}


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


def _handle_request(request: Message, tokenizer: Tokenizer) -> Message:
    task, part, settings = pickle.loads(base64.b64decode(request["task"]))
    try:
        return {"result": asdict(run_task(task, tokenizer, part, settings))}
    except WanmaError as error:
        return {"error": [error.message, error.hint, error.exit_code]}
    except OSError as error:
        return {"os_error": [error.errno, error.strerror]}


if __name__ == "__main__":
    main(*sys.argv[1:])
