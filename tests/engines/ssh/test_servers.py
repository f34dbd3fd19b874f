"""Parameter servers on real hosts: each has an address, files and servers of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.ssh import SshHost, SshSite
from wanma.api.run.job_run import train_job
from wanma.job.file.loading import to_job

SECRET = "a-secret-that-nobody-guesses"
SERVER = "wanma.parameter_server.server"


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def servers(host: SshHost) -> int:
    return sum(SERVER in process.cmdline() for process in host.processes())


@pytest.mark.full
def test_servers_and_workers_on_two_hosts_train_as_one_process(site: SshSite, tmp_path: Path) -> None:
    # SGD, as AdamW makes rounding of gradients near zero as large as any other.
    shared = {"train": {"optimizer": "sgd"}, "parallel": {"dp_shard": 1}}
    spread = {"parallel": {"dp_shard": 1, "dp_replicate": 2}, "servers": {"count": 3, "replicas": 2}}
    command = site.start(site.job(steps=40, **{**shared, **spread}), WANMA_SECRET=SECRET)
    site.wait_for(lambda: [servers(host) for host in site.hosts] in ([2, 1], [1, 2]))
    output, _ = command.communicate(timeout=280)
    assert command.returncode == 0, output + site.output()
    site.wait_until_idle()
    values = site.job(steps=40, **shared).model_dump(exclude_unset=True)
    alone = to_job({**values, "cluster": {}, "observe": {"name": "alone", "console": "quiet"}})
    assert train_job(alone, run_directory=tmp_path / "alone") == 0
    assert losses(site.project / "runs" / "gpt") == pytest.approx(losses(tmp_path / "alone"), abs=2e-6)
