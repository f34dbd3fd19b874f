"""The SSH engine on hosts whose network is cut: they share no folder, and at most an object store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.object_store import ObjectStore, object_store
from support.ssh import CALLER_ADDRESS, SshHost, SshSite, ssh_hosts
from wanma.api.engines.control import cancel_run, run_status
from wanma.api.engines.submission import submit_job
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store(monkeypatch, CALLER_ADDRESS) as store:
        yield store


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> Iterator[SshSite]:
    with ssh_hosts(tmp_path, 2, environment=store.environment) as made:
        (made.project / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        monkeypatch.chdir(made.project)
        yield made


def job(site: SshSite, nodes: int | str, **cluster: Any) -> Job:
    values: dict[str, Any] = {
        "model": {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2},
        "data": {"text": ["corpus.txt"], "sequence_length": 16},
        "train": {"steps": 1_000_000, "global_batch": 4, "deterministic": True},
        "parallel": {"dp_shard": 2},
        "checkpoint": {"every_steps": 0, "in_memory_every_steps": 1},
        "observe": {"name": "gpt", "console": "plain"},
        "cluster": {"engine": "ssh", "nodes": nodes, "ssh": site.section(), **cluster},
    }
    return to_job(values)


def folder(host: SshHost) -> Path:
    return host.home / ".wanma" / "runs" / "gpt"


def steps(host: SshHost) -> list[int]:
    """Return the steps that a host has recorded."""
    path = folder(host) / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def output(host: SshHost) -> str:
    return "\n".join(path.read_text() for path in sorted(folder(host).glob("engine/output-*")))


def wait_for(site: SshSite, condition: Callable[[], object], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "\n".join(output(host)[-3000:] for host in site.hosts)
        time.sleep(0.3)


def ranks(host: SshHost) -> list[str]:
    """Return the names of the ranks' processes on a host."""
    return [process.name() for process in host.processes() if "rank" in process.name()]


def test_of_two_hosts_cut_off_from_each_other_none_goes_on_alone(site: SshSite, store: ObjectStore) -> None:
    first, second = site.hosts
    run, _ = submit_job(job(site, 2, claims=store.url("run")))
    wait_for(site, lambda: len(steps(first)) > 5)
    site.cut()
    wait_for(site, lambda: "1 node missing" in output(first))
    wait_for(site, lambda: not ranks(first) and not ranks(second))
    before = steps(first)
    time.sleep(10)
    assert steps(first) == before
    assert steps(second) == []
    site.mend()
    wait_for(site, lambda: len(steps(first)) > len(before) + 5)
    assert steps(first) == list(range(1, steps(first)[-1] + 1)), "each step once"
    cancel_run(run, is_immediate=False)
    wait_for(site, lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled"
    site.wait_until_idle()


def test_without_an_object_store_a_cut_ends_the_run_on_both_hosts(site: SshSite) -> None:
    first, second = site.hosts
    run, _ = submit_job(job(site, 2, start_timeout_seconds=60))
    wait_for(site, lambda: len(steps(first)) > 5)
    site.cut()
    wait_for(site, lambda: not ranks(first) and not ranks(second))
    before = steps(first)
    wait_for(site, lambda: run_status(run).is_over)
    assert run_status(run).state == "failed"
    assert "error: lost the coordinator at 10.79.7.1:29500: no heartbeat for" in output(second)
    assert "error: node 1 (gpu2) was lost: no heartbeat for" in output(first)
    assert steps(first) == before
    assert steps(second) == []
    site.wait_until_idle()


def check_other_goes_on(site: SshSite, isolated: SshHost, other: SshHost) -> list[int]:
    """Isolate a host, and wait until the other trains alone; return the steps that the first has recorded."""
    isolated.isolate()
    wait_for(site, lambda: not ranks(isolated))
    written = steps(isolated)
    begun = len(steps(other))
    wait_for(site, lambda: len(steps(other)) > begun + 20)
    assert not ranks(isolated)
    assert steps(isolated) == written
    return written


def check_end(
    site: SshSite, run: RunDirectory, isolated: SshHost, other: SshHost, written: list[int]
) -> None:
    """Cancel the run, and check that its steps are consecutive and on one host at a time."""
    begun = len(steps(other))
    wait_for(site, lambda: len(steps(other)) > begun + 20)
    found = steps(other)
    assert found == list(range(found[0], found[-1] + 1)), "each step once"
    assert steps(isolated) == written
    cancel_run(run, is_immediate=False)
    wait_for(site, lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled"
    site.wait_until_idle()


def start_elastic(site: SshSite, store: ObjectStore) -> RunDirectory:
    wanted = job(site, "1..2", claims=store.url("run"), last_call_timeout_seconds=60)
    run, _ = submit_job(wanted)
    wait_for(site, lambda: len(steps(site.hosts[0])) > 5)
    return run


def test_a_first_host_that_was_cut_off_from_everything_is_followed_and_rejoins(
    site: SshSite, store: ObjectStore
) -> None:
    isolated, other = site.hosts
    run = start_elastic(site, store)
    written = check_other_goes_on(site, isolated, other)
    isolated.reconnect()
    wait_for(site, lambda: ranks(isolated))
    check_end(site, run, isolated, other, written)


def test_another_host_that_is_cut_off_from_everything_stops_with_one_message(
    site: SshSite, store: ObjectStore
) -> None:
    other, isolated = site.hosts
    run = start_elastic(site, store)
    written = check_other_goes_on(site, isolated, other)
    wait_for(site, lambda: not isolated.processes())
    message = output(isolated)
    assert message.count("error: ") == 1
    assert "error: lost the coordinator at 10.79.7.1:29500: no heartbeat for" in message
    assert "cannot read the claims in s3://bucket/run" in message
    isolated.reconnect()
    check_end(site, run, isolated, other, written)
