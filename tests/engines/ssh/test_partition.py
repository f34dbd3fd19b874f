"""The SSH engine on hosts whose network is cut: they share no folder, and at most an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.object_store import ObjectStore, object_store
from support.ssh import CALLER_ADDRESS, SshHost, SshSite, ssh_hosts
from wanma.api.engines.control import cancel_run, run_status
from wanma.api.engines.submission import submit_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job

pytestmark = [pytest.mark.full(always=True), pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with object_store(monkeypatch, CALLER_ADDRESS) as store:
        yield store


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: ObjectStore) -> Iterator[SshSite]:
    with ssh_hosts(tmp_path, 2, environment=store.environment) as made:
        monkeypatch.chdir(made.project)
        yield made


def job(site: SshSite, nodes: int | str, **cluster: Any) -> Job:
    checkpoint = {"every_steps": 0, "in_memory_every_steps": 1}
    return site.job(nodes=nodes, steps=1_000_000, checkpoint=checkpoint, cluster=cluster)


def steps(host: SshHost) -> list[int]:
    """Return the steps that a host has recorded."""
    return [step["step"] for step in host.training.metrics]


def test_of_two_hosts_cut_off_from_each_other_none_goes_on_alone(site: SshSite, store: ObjectStore) -> None:
    first, second = site.hosts
    run, _ = submit_job(job(site, 2, claims=store.url("run")))
    site.wait_for(lambda: len(steps(first)) > 5)
    site.cut()
    site.wait_for(lambda: "1 node missing" in first.output)
    site.wait_for(lambda: not first.ranks() and not second.ranks())
    before, looks = steps(first), len(store.requests)
    site.wait_for(lambda: len(store.requests) > looks + 10)  # they look for another coordinator's claim
    assert steps(first) == before
    assert steps(second) == []
    site.mend()
    site.wait_for(lambda: len(steps(first)) > len(before) + 5)
    assert steps(first) == list(range(1, steps(first)[-1] + 1)), "each step once"
    cancel_run(run, is_immediate=False)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled"
    site.wait_until_idle()


def test_without_an_object_store_a_cut_ends_the_run_on_both_hosts(site: SshSite) -> None:
    first, second = site.hosts
    run, _ = submit_job(job(site, 2, start_timeout_seconds=60))
    site.wait_for(lambda: len(steps(first)) > 5)
    site.cut()
    site.wait_for(lambda: not first.ranks() and not second.ranks())
    before = steps(first)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "failed"
    assert "error: lost the coordinator at 10.79.7.1:29500: no heartbeat for" in second.output
    assert "error: node 1 (gpu2) was lost: no heartbeat for" in first.output
    assert steps(first) == before
    assert steps(second) == []
    site.wait_until_idle()


def check_other_goes_on(site: SshSite, isolated: SshHost, other: SshHost) -> list[int]:
    """Isolate a host, and wait until the other trains alone; return the steps that the first has recorded."""
    isolated.isolate()
    site.wait_for(lambda: not isolated.ranks())
    written = steps(isolated)
    begun = len(steps(other))
    site.wait_for(lambda: len(steps(other)) > begun + 20)
    assert not isolated.ranks()
    assert steps(isolated) == written
    return written


def check_end(
    site: SshSite, run: RunDirectory, isolated: SshHost, other: SshHost, written: list[int]
) -> None:
    """Cancel the run, and check that its steps are consecutive and on one host at a time."""
    begun = len(steps(other))
    site.wait_for(lambda: len(steps(other)) > begun + 20)
    found = steps(other)
    assert found == list(range(found[0], found[-1] + 1)), "each step once"
    assert steps(isolated) == written
    cancel_run(run, is_immediate=False)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled"
    site.wait_until_idle()


def start_elastic(site: SshSite, store: ObjectStore) -> RunDirectory:
    wanted = job(site, "1..2", claims=store.url("run"), last_call_timeout_seconds=60)
    run, _ = submit_job(wanted)
    site.wait_for(lambda: len(steps(site.hosts[0])) > 5)
    return run


def test_a_first_host_that_was_cut_off_from_everything_is_followed_and_rejoins(
    site: SshSite, store: ObjectStore
) -> None:
    isolated, other = site.hosts
    run = start_elastic(site, store)
    written = check_other_goes_on(site, isolated, other)
    isolated.reconnect()
    site.wait_for(lambda: isolated.ranks())
    check_end(site, run, isolated, other, written)


def test_another_host_that_is_cut_off_from_everything_stops_with_one_message(
    site: SshSite, store: ObjectStore
) -> None:
    other, isolated = site.hosts
    run = start_elastic(site, store)
    written = check_other_goes_on(site, isolated, other)
    site.wait_for(lambda: not isolated.processes())
    message = isolated.output
    assert message.count("error: ") == 1
    assert "error: lost the coordinator at 10.79.7.1:29500: no heartbeat for" in message
    assert "cannot read the claims in s3://bucket/run" in message
    isolated.reconnect()
    check_end(site, run, isolated, other, written)
