"""Records of hosts, brought home and taken along: new bytes of files that grow, others as a whole."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wanma.engines.hosts import host_files
from wanma.engines.hosts.connections import Connections, Host, HostError, Reply
from wanma.engines.hosts.records import (
    RecordOwner,
    RecordSource,
    _known,
    _store,
    fetch_records,
    record_owner,
    send_history,
)
from wanma.engines.ssh.hosts import parse_host
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory

OWNER = RecordOwner("a")


class Buffered(io.StringIO):
    """Standard output whose bytes are kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = io.BytesIO()


def ask(
    folder: Path, known: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, only_logs: bool = False
) -> Reply:
    values: list[Any] = []
    output = Buffered()
    monkeypatch.setattr(sys, "stdout", output)
    request = {"operation": "records", "folder": str(folder), "known": known, "only_logs": only_logs}
    assert host_files.main(request, values.append) == 0
    return Reply(values[0], output.buffer.getvalue())


def host(name: str) -> Host:
    return parse_host(name, "test")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    there, here = tmp_path / "there", tmp_path / "here"
    for name in ("logs", "engine", "checkpoints/step-00000001"):
        (there / name).mkdir(parents=True)
    here.mkdir()
    (there / "metrics.jsonl").write_text('{"step": 1}\n')
    (there / "report.html").write_text("first")
    (there / "logs" / "rank-0.log").write_text("begin\n")
    (there / "engine" / "output-0.log").write_text("console\n")
    (there / "engine" / "node-0.json").write_text("{}")
    (there / "checkpoints" / "step-00000001" / "manifest.json").write_text("large")
    (there / ".lock").write_text("")
    return there, here


def test_small_records_come_and_nothing_else(folders, monkeypatch) -> None:
    there, here = folders
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    found = {path.relative_to(here).as_posix() for path in here.rglob("*") if path.is_file()}
    assert found == {"metrics.jsonl", "report.html", "logs/rank-0.log", "engine/output-0.log"}


def test_only_new_bytes_are_sent(folders, monkeypatch) -> None:
    there, here = folders
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    assert ask(there, _known(here), monkeypatch).value["files"] == []
    with (there / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    (there / "report.html").write_text("other")
    reply = ask(there, _known(here), monkeypatch)
    assert reply.value["files"] == [["metrics.jsonl", 12, 12], ["report.html", 0, 5]]
    _store({host("a"): reply}, OWNER, here)
    assert (here / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (here / "report.html").read_text() == "other"


def test_a_file_that_was_written_anew_is_sent_as_a_whole(folders, monkeypatch) -> None:
    there, here = folders
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    (there / "metrics.jsonl").write_text('{"step": 7}\n{"step": 8}\n')
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    assert (here / "metrics.jsonl").read_text() == '{"step": 7}\n{"step": 8}\n'


def test_the_empty_log_of_a_new_start_replaces_that_of_an_earlier_one(folders, monkeypatch) -> None:
    there, here = folders
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    (there / "engine" / "output-0.log").write_text("")
    _store({host("a"): ask(there, _known(here), monkeypatch)}, OWNER, here)
    assert (here / "engine" / "output-0.log").read_text() == ""
    assert ask(there, _known(here), monkeypatch).value["files"] == []


def test_a_long_file_comes_in_several_answers(folders, monkeypatch) -> None:
    there, here = folders
    monkeypatch.setattr(host_files, "MOST_BYTES", 10)
    for _ in range(20):
        reply = ask(there, _known(here), monkeypatch)
        _store({host("a"): reply}, OWNER, here)
        if reply.value["is_complete"]:
            break
    for name in ("metrics.jsonl", "report.html", "logs/rank-0.log"):
        assert (here / name).read_text() == (there / name).read_text()


def test_of_a_log_on_two_hosts_the_newest_counts(tmp_path: Path) -> None:
    old = Reply(
        {"files": [["logs/rank-1.log", 0, 3]], "times": {"logs/rank-1.log": 5.0}, "steps_changed": 0.0},
        b"old",
    )
    new = Reply(
        {"files": [["logs/rank-1.log", 0, 3]], "times": {"logs/rank-1.log": 9.0}, "steps_changed": 0.0},
        b"new",
    )
    for replies in ({host("a"): old, host("b"): new}, {host("a"): new, host("b"): old}):
        _store(replies, OWNER, tmp_path)
        assert (tmp_path / "logs" / "rank-1.log").read_text() == "new"


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "engine.json", "logs/../../evil"])
def test_a_host_cannot_write_outside_the_run_directory(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    _store(
        {host("a"): Reply({"files": [[name, 0, 3]], "times": {name: 1.0}, "steps_changed": 0.0}, b"bad")},
        OWNER,
        run,
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not Path("/tmp/evil").exists()


class HostsHere(Connections):
    """Connections whose hosts are folders of this process: `ask` calls the host's program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.operations: list[str] = []
        self.lost: set[Host] = set()

    def ask(
        self,
        host: Host,
        program: Any,
        request: Any,
        data: Any = b"",
        seconds: float = 0,  # as of SshConnections
    ) -> Reply:
        if host in self.lost:
            raise HostError(host, f"{host.text}: it cannot be reached", "")
        values: list[Any] = []
        self.operations.append(request["operation"])
        output = Buffered()
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
            patch.setattr(sys, "stdout", output)
            assert program.main(request, values.append) == 0
        return Reply(values[0], output.buffer.getvalue())

    def ask_all(
        self, questions: Mapping[Host, Callable[[], Reply]]
    ) -> tuple[dict[Host, Reply], list[HostError]]:
        answers, failures = {}, []
        for asked, question in questions.items():
            try:
                answers[asked] = question()
            except HostError as error:
                failures.append(error)
        return answers, failures


STEPS = [f'{{"step": {number}}}\n' for number in range(1, 5)]


@pytest.mark.parametrize(
    ("there", "left"),
    [
        pytest.param(None, STEPS[:3], id="another host"),
        pytest.param(STEPS[:1], STEPS[:3], id="first host of an earlier start"),
        pytest.param([STEPS[0], STEPS[3]], STEPS[:3], id="steps that were repeated elsewhere"),
        pytest.param(STEPS, STEPS, id="more than is here"),
    ],
)
def test_the_history_goes_along_to_another_first_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str] | None, left: list[str]
) -> None:
    run = RunDirectory(tmp_path / "here")
    sources = [RecordSource(host(name), str(tmp_path / name)) for name in ("a", "b")]
    for source in sources:
        (Path(source.folder) / "checkpoints").mkdir(parents=True)
    connections: Any = HostsHere(monkeypatch)
    run.path.mkdir()
    send_history(connections, sources, run)
    assert connections.operations == []  # a first start asks nobody
    run.metrics.write_text("".join(STEPS[:3]))
    (run.path / "logs").mkdir()
    run.rank_log(0).write_text("stays here\n")
    if there is not None:
        (tmp_path / "a" / "metrics.jsonl").write_text("".join(there))
    send_history(connections, sources, run)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == "".join(left)
    assert {path.name for name in "ab" for path in (tmp_path / name).iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
    }


def test_a_run_whose_checkpoints_are_on_no_host_does_not_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "here")
    sources = [RecordSource(host(name), str(tmp_path / name)) for name in ("a", "b")]
    for source in sources:
        (Path(source.folder) / "checkpoints").mkdir(parents=True)
    (run.checkpoints / "step-00000004").mkdir(parents=True)
    run.metrics.write_text("".join(STEPS))
    (tmp_path / "b" / "checkpoints" / "step-00000004.partial-1-1").mkdir()
    connections: Any = HostsHere(monkeypatch)
    with pytest.raises(WanmaError, match=r"step-00000004, is in .* and on none of its hosts"):
        send_history(connections, sources, run)
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    (tmp_path / "b" / "checkpoints" / "step-00000004").mkdir()
    send_history(connections, sources, run)
    assert (tmp_path / "a" / "metrics.jsonl").exists()


def test_steps_of_a_coordinator_that_took_over_follow_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "here")
    run.engine_files.mkdir(parents=True)
    one, two = (RecordSource(host(name), str(tmp_path / name)) for name in ("a", "b"))
    for source in (one, two):
        for name in ("checkpoints", "engine", "logs"):
            (Path(source.folder) / name).mkdir(parents=True)
    connections: Any = HostsHere(monkeypatch)
    written = iter(range(1_000, 2_000))

    def write(source: RecordSource, name: str, lines: list[str]) -> None:
        path = Path(source.folder) / name
        path.write_text("".join(lines))
        now = next(written)
        os.utime(path, (now, now))

    def fetch() -> list[str]:
        fetch_records(connections, [one, two], run)
        return run.metrics.read_text().splitlines(keepends=True)

    write(one, "metrics.jsonl", STEPS)
    write(one, "events.jsonl", ["start\n"])
    assert fetch() == STEPS
    connections.lost = {one.host}
    assert fetch() == STEPS
    write(two, "metrics.jsonl", ['{"step":'])
    assert fetch() == STEPS
    own = ['{"step": 4, "is_repeated": true}\n', '{"step": 5}\n']
    write(two, "metrics.jsonl", own)
    write(two, "events.jsonl", ["takeover\n"])
    assert fetch() == STEPS[:3] + own
    assert run.events.read_text() == "start\ntakeover\n"
    connections.lost = set()
    own.append('{"step": 6}\n')
    write(two, "metrics.jsonl", own)
    assert fetch() == STEPS[:3] + own
    own[1:] = ['{"step": 5, "is_repeated": true}\n']  # as after a restart from step 4
    write(two, "metrics.jsonl", own)
    assert fetch() == STEPS[:3] + own
    assert record_owner(run, [one, two]).host == "b"
    send_history(connections, [one, two], run)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == "".join(STEPS[:3] + own)
    assert record_owner(run, [one, two]).host == "a"


def test_only_the_files_of_the_run_itself_are_removed(tmp_path: Path) -> None:
    folder, replies = tmp_path / "runs" / "gpt", list[Any]()
    (folder / "engine").mkdir(parents=True)
    (folder / "engine" / "origin.json").write_text('["/home/me/runs/gpt", "login"]')
    request = {"operation": "remove", "folder": str(folder), "origin": ["/home/you/runs/gpt", "login"]}
    assert host_files.main(request, replies.append) == 0
    assert replies == [{"problem": "origin", "text": "/home/me/runs/gpt on login"}]
    assert folder.exists()
    for is_removed in (True, False):  # the second node may have the same folder
        host_files.main({**request, "origin": ["/home/me/runs/gpt", "login"]}, replies.append)
        assert replies[-1] == {"is_removed": is_removed}
    assert not folder.exists()
