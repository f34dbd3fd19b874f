"""Encoding of a corpus: in this process when it is small, else in several that each take tasks in turn.

The processes (`tokenization_process.py`) are gone when `tokenize_documents` returns.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path

from wanma.data.documents.document_groups import DocumentGroup
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
from wanma.data.text.shared_tasks import Encode, EncodedPart, SharedTasks
from wanma.data.text.task_json import task_to_json
from wanma.data.text.tokenization_process import serve_tasks
from wanma.data.text.tokenizer import BytesTokenizer, Tokenizer
from wanma.job.errors import WanmaError
from wanma.job.run.child_process import ChildProcess
from wanma.job.run.resource_limits import usable_cores

Progress = Callable[[int, int], None]
"""Callback for (bytes done, bytes in all)."""

_Done = tuple[int, EncodingTask, EncodedPart | None]
"""Number of a task, the task, and its part; None: another node encodes it, which only a helper leaves so."""

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
    node: str,
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

    tasks: Iterator[tuple[int, EncodingTask]] = enumerate(plan_tasks(groups, writer.folder, settings))
    with SharedTasks(writer.folder, node) as shared:
        for number, task in tasks:
            written = writer.written_result(task.name)
            if written is None:
                tasks = chain([(number, task)], tasks)
                break
            note(task, EncodingResult(**written))
            shared.mark_joined(number)
        runner = _Runner(tokenizer, writer.folder, settings, shared.run_as_builder)
        count = encoding_processes(groups, tokenizer, process_count)
        with closing(runner.run(tasks, count)) as encoded_tasks:  # no thread claims a task after the end
            for number, task, encoded in encoded_tasks:
                assert encoded is not None
                part, result = encoded
                writer.append(part, task.name, result.to_json())
                shared.mark_joined(number)
                note(task, result)
    if progress and processed_bytes != total_bytes:  # rows are counted by their share of a file
        progress(total_bytes, total_bytes)
    return total


def help_tokenizing(
    groups: Sequence[DocumentGroup],
    tokenizer: Tokenizer,
    folder: Path,
    settings: ReadingSettings,
    node: str,
    is_over: Callable[[], bool],
    progress: Progress | None = None,
    process_count: int | None = None,
) -> int:
    """Encode tasks of a token file that another node builds, and return their number.

    Args:
        is_over: returns True once the builder has ended.
        progress: called with (bytes in the token file, bytes in all), after tasks of this node.
    """
    shared = SharedTasks(folder, node)
    planned_bytes = [0]  # of all tasks before each number

    def planned_tasks() -> Iterator[EncodingTask]:
        for task in plan_tasks(groups, folder, settings):
            planned_bytes.append(planned_bytes[-1] + task.size)
            yield task

    tasks = shared.open_tasks(planned_tasks(), is_over)
    runner = _Runner(tokenizer, folder, settings, shared.run_as_helper)
    total_bytes = sum(group.size for group in groups)
    count = 0
    for _, _, encoded in runner.run(tasks, encoding_processes(groups, tokenizer, process_count)):
        count += encoded is not None
        if progress:
            joined_bytes = planned_bytes[min(shared.joined, len(planned_bytes) - 1)]
            progress(min(joined_bytes, total_bytes), total_bytes)
    return count


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


class _Runner:
    """Runner of numbered tasks, in this process or in several.

    Args:
        claim: function (number, task, encode) that lets `encode` write the part unless another node does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        settings: ReadingSettings,
        claim: Callable[[int, EncodingTask, Encode], EncodedPart | None],
    ) -> None:
        self._tokenizer, self._folder, self._settings, self._claim = tokenizer, folder, settings, claim

    def run(
        self, tasks: Iterator[tuple[int, EncodingTask]], process_count: int
    ) -> Generator[_Done, None, None]:
        """Yield (number, task, result) in the order of the tasks."""
        first = list(islice(tasks, max(process_count, 2)))
        rest = chain(first, tasks)
        count = min(process_count, len(first))
        if count > 1:
            return _tokenize_in_processes(
                rest, self._tokenizer, self._folder, self._settings, self._claim, count
            )
        return self._tokenize_here(rest)

    def _tokenize_here(self, tasks: Iterable[tuple[int, EncodingTask]]) -> Generator[_Done, None, None]:
        for number, task in tasks:

            def encode(part: Path, task: EncodingTask = task) -> EncodingResult:
                return run_task(task, self._tokenizer, part, self._settings)

            yield number, task, self._claim(number, task, encode)


def _tokenize_in_processes(
    tasks: Iterable[tuple[int, EncodingTask]],
    tokenizer: Tokenizer,
    folder: Path,
    settings: ReadingSettings,
    claim: Callable[[int, EncodingTask, Encode], EncodedPart | None],
    process_count: int,
) -> Generator[_Done, None, None]:
    """Encode tasks in processes, each held by one thread; results come in the order of the tasks."""
    tokenizer_folder = Path(tempfile.mkdtemp(prefix="tokenizer-", dir=folder))
    tokenizer.save(tokenizer_folder)
    idle_processes: queue.SimpleQueue[_TokenizationProcess] = queue.SimpleQueue()
    processes: list[_TokenizationProcess] = []
    pending: deque[tuple[int, EncodingTask, Future[EncodedPart | None]]] = deque()

    def encode(number: int, task: EncodingTask) -> EncodedPart | None:
        def encode_in_process(part: Path) -> EncodingResult:
            process = idle_processes.get()
            try:
                return process.encode(task, part, settings)
            finally:
                idle_processes.put(process)

        return claim(number, task, encode_in_process)

    pool = ThreadPoolExecutor(process_count, thread_name_prefix="wanma-tokens")
    try:
        for _ in range(process_count):
            processes.append(_TokenizationProcess(tokenizer, tokenizer_folder))
            idle_processes.put(processes[-1])
        for number, task in tasks:
            pending.append((number, task, pool.submit(encode, number, task)))
            if len(pending) >= _TASKS_PER_PROCESS * process_count:
                first, oldest, future = pending.popleft()
                yield first, oldest, future.result()
        while pending:
            first, oldest, future = pending.popleft()
            yield first, oldest, future.result()
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
        self._process.send({"task": task_to_json(task), "part": str(part), "settings": asdict(settings)})
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
