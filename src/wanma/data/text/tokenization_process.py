"""Process that encodes documents for `tokenization.py`: a task is a request, its result the answer.

A new interpreter is started as `python -m wanma.data.text.tokenization_process FOLDER HASH`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wanma.data.documents.document_groups import DocumentGroup
from wanma.data.stores.filesystems import filesystem_from_json, filesystem_to_json
from wanma.data.stores.listing import StoredFile
from wanma.data.text.encoding_task import EncodingTask, ReadingSettings, run_task
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


def task_to_json(task: EncodingTask) -> dict[str, Any]:
    """Return a task as JSON-able values; inverse of `task_from_json`."""
    filesystems: dict[int, int] = {}
    texts: list[str] = []
    files = []
    for file in task.group.files:
        if id(file.filesystem) not in filesystems:
            filesystems[id(file.filesystem)] = len(texts)
            texts.append(filesystem_to_json(file.filesystem))
        number = filesystems[id(file.filesystem)]
        files.append(
            [
                number,
                file.path,
                file.url,
                file.size,
                file.version,
                file.is_named,
                file.job_key,
                file.content_hash,
            ]
        )
    group = task.group
    described = [group.kind, group.format_name, group.column, dict(group.facts), group.is_compressed]
    return {
        "filesystems": texts,
        "files": files,
        "group": described,
        "range": [task.size, task.start, task.end],
    }


def task_from_json(value: dict[str, Any]) -> EncodingTask:
    """Return the task that `task_to_json` has described."""
    filesystems = [filesystem_from_json(text) for text in value["filesystems"]]
    files = tuple(StoredFile(filesystems[number], *rest) for number, *rest in value["files"])
    kind, *rest = value["group"]
    return EncodingTask(DocumentGroup(kind, files, *rest), *value["range"])


if __name__ == "__main__":
    main(*sys.argv[1:])
