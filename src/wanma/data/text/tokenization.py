"""Encoding of a corpus: in this process when it is small, else in several that each take tasks in turn.

The processes (`tokenization_process.py`) are gone when `tokenize_documents` returns.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path

from wanma.data.documents.document_groups import DocumentGroup
from wanma.data.index.build import Progress
from wanma.data.stores.filesystems import is_shared_memory
from wanma.data.text.encoding_task import (
    EncodingResult,
    EncodingTask,
    ReadingSettings,
    check_bad_limit,
    plan_tasks,
    run_task,
)
from wanma.data.text.part_writer import TokenFileWriter
from wanma.data.text.tokenization_process import serve_tasks, task_request
from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer
from wanma.job.errors import WanmaError
from wanma.job.run.child_process import ChildProcess
from wanma.job.run.resource_limits import usable_cores

_Done = tuple[EncodingTask, Path, EncodingResult]
"""Task, its part, and its result."""

_BYTE_TEXT_PER_PROCESS = 512 << 20
_BPE_TEXT_PER_PROCESS = 2 << 20
"""Bytes of text per additional process: copying bytes is fast, merging them into words is not."""
_TASKS_PER_PROCESS = 2
"""Tasks for each process that are done or under way before their parts are joined."""


def tokenize_documents(
    groups: Sequence[DocumentGroup],
    tokenizer: Tokenizer,
    writer: TokenFileWriter,
    settings: ReadingSettings,
    progress: Progress | None = None,
    process_count: int | None = None,
) -> EncodingResult:
    """Write every document's tokens, in order, to `writer`; parts that it has already are not done again.

    Args:
        writer: the token file; its folder holds the processes' parts, which are removed one by one.
        process_count: number of processes; default: by the size of the corpus, up to the cores.

    Raises:
        WanmaError: a file cannot be read, or data is bad and refused, or too much of it is bad.
    """
    total_bytes = sum(group.size for group in groups)
    processed_bytes = 0
    total = EncodingResult()
    if progress:
        progress(0, total_bytes)

    def note(task: EncodingTask, result: EncodingResult) -> None:
        nonlocal processed_bytes
        total.extend(result)
        check_bad_limit(len(total.bad_rows), total.bad_rows, settings)
        processed_bytes += task.size
        if progress:
            progress(min(processed_bytes, total_bytes), total_bytes)

    tasks = plan_tasks(groups, writer.folder, settings)
    for task in tasks:
        written = writer.written_result(task.name)
        if written is None:
            tasks = chain([task], tasks)
            break
        note(task, EncodingResult(**written))
    count = encoding_processes(groups, tokenizer, process_count)
    with closing(_encode(tasks, tokenizer, writer.folder, settings, count)) as encoded:
        for task, part, result in encoded:
            writer.append(part, task.name, asdict(result))
            note(task, result)
    if progress and processed_bytes != total_bytes:  # rows are counted by their share of a file
        progress(total_bytes, total_bytes)
    return total


def text_per_process(tokenizer: Tokenizer) -> int:
    """Return the bytes of text for each additional process."""
    return _BYTE_TEXT_PER_PROCESS if isinstance(tokenizer, BytesTokenizer) else _BPE_TEXT_PER_PROCESS


def encoding_processes(groups: Sequence[DocumentGroup], tokenizer: Tokenizer, given: int | None) -> int:
    """Return the number of encoding processes; 0 or 1: this one encodes."""
    if any(is_shared_memory(file.filesystem) for group in groups for file in group.files):
        return 1  # no other process reads our memory
    if given is not None:
        return given
    return min(usable_cores(), sum(group.size for group in groups) // text_per_process(tokenizer))


def _encode(
    tasks: Iterator[EncodingTask],
    tokenizer: Tokenizer,
    folder: Path,
    settings: ReadingSettings,
    process_count: int,
) -> Generator[_Done, None, None]:
    """Encode tasks, in this process or in several; parts come in the order of the tasks."""
    first = list(islice(tasks, max(process_count, 2)))
    count = min(process_count, len(first))
    numbered = ((task, folder / f"part-{number}") for number, task in enumerate(chain(first, tasks)))
    if count > 1:
        yield from _tokenize_in_processes(numbered, tokenizer, folder, settings, count)
    else:
        for task, part in numbered:
            yield task, part, run_task(task, tokenizer, part, settings)


def _tokenize_in_processes(
    tasks: Iterable[tuple[EncodingTask, Path]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: ReadingSettings,
    process_count: int,
) -> Generator[_Done, None, None]:
    """Encode tasks in processes, each held by one thread."""
    tokenizer_folder = Path(tempfile.mkdtemp(prefix="tokenizer-", dir=folder))
    tokenizer.save(tokenizer_folder)
    idle_processes: queue.SimpleQueue[_TokenizationProcess] = queue.SimpleQueue()
    processes: list[_TokenizationProcess] = []
    pending: deque[Future[_Done]] = deque()

    def encode(task: EncodingTask, part: Path) -> _Done:
        process = idle_processes.get()
        try:
            return task, part, process.encode(task, part, settings)
        finally:
            idle_processes.put(process)

    pool = ThreadPoolExecutor(process_count, thread_name_prefix="wanma-tokens")
    try:
        for _ in range(process_count):
            processes.append(_TokenizationProcess(tokenizer, tokenizer_folder))
            idle_processes.put(processes[-1])
        for task, part in tasks:
            pending.append(pool.submit(encode, task, part))
            if len(pending) >= _TASKS_PER_PROCESS * process_count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:  # also when a document fails or the user interrupts: the kill frees the waiting threads
        for process in processes:
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
        for process in processes:
            process.close()
        shutil.rmtree(tokenizer_folder, ignore_errors=True)


class _TokenizationProcess:
    """Encoding process, which takes one task at a time.

    Args:
        tokenizer: the tokenizer.
        folder: folder in which the tokenizer was saved.
    """

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        module = "wanma.data.text.tokenization_process"
        serve = partial(serve_tasks, tokenizer)
        self._process = ChildProcess(serve, module, str(folder), tokenizer.fingerprint)
        self.kill, self.close = self._process.kill, self._process.close

    def encode(self, task: EncodingTask, part: Path, settings: ReadingSettings) -> EncodingResult:
        """Let the process encode a task; arguments and errors as of `run_task`."""
        self._process.send(task_request(task, part, settings))
        answer = next(self._process.answers(), None)
        if answer is None:
            code = self._process.wait()
            raise WanmaError(
                f"a tokenization process exited early with code {code}",
                "check the memory of this node (the usual cause), and the message of the process above, if "
                "any",
            )
        if "os_error" in answer:
            raise OSError(*answer["os_error"])
        if "error" in answer:
            raise WanmaError(*answer["error"])
        return EncodingResult(**answer["result"])
