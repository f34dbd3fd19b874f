"""Preparation by several nodes with a common cache: they share the tasks, and any of them may die."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wanma.data.documents.document_groups import group_documents
from wanma.data.documents.text_files import list_documents
from wanma.data.text import encoding_task, token_file
from wanma.data.text.encoding_task import EncodingResult, EncodingTask, ReadingSettings
from wanma.data.text.shared_tasks import SharedTasks
from wanma.data.text.token_file import open_or_build_token_file
from wanma.data.text.tokenizer import BytesTokenizer
from wanma.job.errors import JobError

NODE = """
import sys, time
from pathlib import Path
from wanma.data.documents.text_files import list_documents
from wanma.data.text import encoding_task, token_file, tokenization
from wanma.data.text.tokenizer import BytesTokenizer
corpus, cache, node, pause, hanging_task = sys.argv[1:]
encoding_task.TASK_BYTES = 100
token_file.node_name = lambda: node
run, count = tokenization.run_task, 0
def counted(*arguments):
    global count
    count += 1
    print("task", count, flush=True)
    time.sleep(600 if count == int(hanging_task) else float(pause))
    return run(*arguments)
tokenization.run_task = counted
file = token_file.open_or_build_token_file(
    list_documents([corpus]), BytesTokenizer(), Path(cache), process_count=1
)
print(count, file.fingerprint, flush=True)
"""
TASKS = 41


@pytest.fixture
def fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fingerprint of a corpus of 41 tasks, built alone."""
    monkeypatch.setattr(encoding_task, "TASK_BYTES", 100)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"document {number}\n" * 8)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(100)))
    file = open_or_build_token_file(list_documents([str(folder)]), BytesTokenizer(), tmp_path / "alone")
    return file.fingerprint


@contextlib.contextmanager
def node(
    tmp_path: Path, name: str, pause: float = 0.05, hanging_task: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Start to build on a node of that name, and wait until it encodes its first task."""
    command = [sys.executable, "-c", NODE, str(tmp_path / "corpus"), str(tmp_path / "cache"), name]
    command += [str(pause), str(hanging_task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "task 1\n"
            yield process
        finally:
            process.kill()


def wait_for_task(process: subprocess.Popen[str], number: int) -> None:
    while process.stdout.readline() != f"task {number}\n":
        pass


def result(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Number of tasks that a node has encoded, and the fingerprint that it has found."""
    count, found = process.communicate(timeout=120)[0].splitlines()[-1].split()
    return int(count), found


def check_folders(tmp_path: Path) -> None:
    (folder,) = (path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())
    assert sorted(path.name for path in folder.iterdir()) == [
        "digests.bin", "header.json", "offsets.bin", "tokens.bin", "verified.json",
    ]  # fmt: skip


def test_nodes_share_the_tasks_and_get_the_same_file(fingerprint: str, tmp_path: Path) -> None:
    with node(tmp_path, "first", 0.2) as builder, node(tmp_path, "second", 0.2) as helper:
        results = [result(helper), result(builder)]
    assert {found for _, found in results} == {fingerprint}
    counts = [count for count, _ in results]
    assert sum(counts) == TASKS, "no task is encoded twice"
    assert min(counts) > 5
    check_folders(tmp_path)


def test_a_helper_that_dies_is_replaced(fingerprint: str, tmp_path: Path) -> None:
    with node(tmp_path, "first", 0.2) as builder, node(tmp_path, "second", 0.05, 3) as helper:
        wait_for_task(helper, 3)
        helper.send_signal(signal.SIGKILL)
        helper.wait()
        count, found = result(builder)
    assert found == fingerprint
    assert count == TASKS - 2
    check_folders(tmp_path)


def test_a_builder_that_dies_is_succeeded_by_its_helper(fingerprint: str, tmp_path: Path) -> None:
    with node(tmp_path, "first", 0.1, 5) as builder, node(tmp_path, "second", 0.1) as helper:
        wait_for_task(builder, 5)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        count, found = result(helper)
    assert found == fingerprint
    assert count >= TASKS - 5
    check_folders(tmp_path)


def only_task(folder: Path) -> tuple[EncodingTask, Callable[[Path], EncodingResult]]:
    """Return the task of a corpus of one file, and the function that encodes it."""
    path = folder / "a.txt"
    path.write_text("text")
    groups, _ = group_documents(list_documents([str(path)]))
    (task,) = encoding_task.plan_tasks(groups, folder, ReadingSettings())
    return task, lambda part: encoding_task.run_task(task, BytesTokenizer(), part, ReadingSettings())


def test_a_task_is_the_builders_until_it_is_joined(tmp_path: Path) -> None:
    """Between its encoding and its joining nothing else tells a helper that the task is done."""
    task, encode = only_task(tmp_path)
    helper = SharedTasks(tmp_path, "helper")
    with SharedTasks(tmp_path, "builder") as builder:
        part, _ = builder.run_as_builder(0, task, encode)
        assert part == tmp_path / "part-0"
        assert helper.run_as_helper(0, task, encode) is None
        builder.mark_joined(0)
        assert helper.run_as_helper(0, task, encode) is None
    assert not list(tmp_path.glob("part-0-*"))


def test_a_task_that_a_builder_gives_up_is_free(tmp_path: Path) -> None:
    task, encode = only_task(tmp_path)
    with SharedTasks(tmp_path, "builder") as builder:
        builder.run_as_builder(0, task, encode)
    assert SharedTasks(tmp_path, "helper").run_as_helper(0, task, encode) is not None


def test_a_helper_with_a_lower_limit_gives_no_part(tmp_path: Path) -> None:
    """The limit of bad rows is not part of a token file: jobs with others share it."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"text": %s}\n' % ("5" if row in (3, 5) else '"good"') for row in range(50)))
    groups, _ = group_documents(list_documents([str(path)]))
    strict, lenient = ReadingSettings(bad_data="skip", bad_data_limit=1), ReadingSettings(bad_data="skip")
    assert strict.identity == lenient.identity
    (task,) = encoding_task.plan_tasks(groups, tmp_path, lenient)
    with pytest.raises(JobError, match=r"data\.bad_data_limit: more than 1 rows"):
        SharedTasks(tmp_path, "helper").run_as_helper(
            0, task, lambda part: encoding_task.run_task(task, BytesTokenizer(), part, strict)
        )
    with SharedTasks(tmp_path, "builder") as builder:
        _, result = builder.run_as_builder(
            0, task, lambda part: encoding_task.run_task(task, BytesTokenizer(), part, lenient)
        )
    assert (result.documents, len(result.bad_rows)) == (48, 2)


def test_a_helper_that_begins_at_the_end_leaves_no_files(
    fingerprint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json = token_file.write_json

    def write_and_begin(path: Path, value: object) -> None:
        write_json(path, value)
        if path.name == "verified.json":
            (path.parent / "part-40-helper").touch()
            (path.parent / "blocks-helper").mkdir(exist_ok=True)

    monkeypatch.setattr(token_file, "write_json", write_and_begin)
    file = open_or_build_token_file(
        list_documents([str(tmp_path / "corpus")]), BytesTokenizer(), tmp_path / "cache"
    )
    assert file.fingerprint == fingerprint
    check_folders(tmp_path)
