"""Tasks of encoding as JSON, for the processes that run them. No torch here."""

from __future__ import annotations

from typing import Any

from wanma.data.documents.document_groups import DocumentGroup
from wanma.data.stores.filesystems import filesystem_from_json, filesystem_to_json
from wanma.data.stores.listing import StoredFile
from wanma.data.text.encoding_task import EncodingTask


def task_to_json(task: EncodingTask) -> dict[str, Any]:
    """Return a task as JSON-able values; inverse of `task_from_json`."""
    filesystems: dict[int, int] = {}
    texts: list[str] = []
    files = []
    for file in task.group.files:
        if id(file.filesystem) not in filesystems:
            filesystems[id(file.filesystem)] = len(texts)
            texts.append(filesystem_to_json(file.filesystem))
        files.append([filesystems[id(file.filesystem)], *_file_fields(file)])
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


def _file_fields(file: StoredFile) -> list[Any]:
    return [file.path, file.url, file.size, file.version, file.is_named, file.job_key, file.content_hash]
