"""Faults of hosts under a run: each is told once, and costs nothing but the work of the host."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
import torch

import wanma
from support.command import Training
from support.ssh import SshHost, SshSite, ssh_hosts, start_sshd
from wanma.api.engines.control import cancel_run, fetch_records, run_status
from wanma.api.engines.submission import submit_job
from wanma.api.run.job_run import train_job
from wanma.checkpoint.load.reader import find_newest_valid
from wanma.cli.main import main
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory

MODEL = """\
import layers_of_this_machine
import torch


class Data:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(8), torch.tensor(index % 4)


def build():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
"""


def supervisor(host: SshHost) -> psutil.Process:
    """Return the process of a host's supervisor."""
    found = [one for one in host.processes() if "--rendezvous" in one.cmdline()]
    return min(found, key=lambda one: one.create_time())


def end(site: SshSite, run: RunDirectory) -> None:
    """Stop a run in order, and check that nothing of it is left on the hosts."""
    cancel_run(run, is_immediate=False)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled", site.output()
    fetch_records(run)
    site.wait_until_idle()


@pytest.mark.full(always=True)
def test_the_run_goes_on_with_the_same_weights_when_a_supervisor_is_killed(
    site: SshSite, tmp_path: Path
) -> None:
    first, second = site.hosts
    train = {"schedule": "constant", "warmup_steps": 0}  # equal in a run of any length
    wanted = site.job(
        nodes="1..2",
        steps=100_000,
        train=train,
        checkpoint={"every_steps": 0, "in_memory_every_steps": 1},
        cluster={"last_call_timeout_seconds": 60},
    )
    run, _ = submit_job(wanted)
    site.wait_for(lambda: first.training.steps_begun() > 5)
    supervisor(second).kill()
    site.wait_for(lambda: not second.left())
    before = first.training.steps_begun()
    site.wait_for(lambda: first.training.steps_begun() > before + 5)
    assert run_status(run).state == "running"
    end(site, run)
    steps = [step["step"] for step in Training(run.path).metrics]
    assert steps == list(range(1, steps[-1] + 1)), "each step once"
    values = site.job(steps=steps[-1], train=train).model_dump(exclude_unset=True)
    alone = to_job(
        {**values, "cluster": {"engine": "local"}, "observe": {"name": "alone", "console": "quiet"}}
    )
    assert train_job(alone, run_directory=tmp_path / "alone") == 0
    expected, found = Training(tmp_path / "alone").state(), first.training.state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.full(always=True)
def test_a_detached_run_is_found_again_when_sshd_is_back(
    site: SshSite, capsys: pytest.CaptureFixture[str]
) -> None:
    training = site.hosts[0].training
    run, _ = submit_job(site.job(steps=100_000))
    site.wait_for(lambda: training.steps_begun() > 2)
    fetch_records(run)
    ranks = [host.ranks() for host in site.hosts]
    assert all(ranks)
    follower = site.call("logs", "gpt", "-f")
    assert follower.stdout is not None
    for host in site.hosts:
        host.stop_sshd()
    before = training.steps_begun()
    site.wait_for(lambda: training.steps_begun() > before + 2)
    names = [host.text for host in site.hosts]
    assert main(["status", "gpt"]) == 0
    shown = capsys.readouterr()
    assert "gpt: unknown" in shown.out
    assert all(f"{name}: nothing listens there" in shown.out for name in names)
    assert main(["runs"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^gpt +unknown ", shown.out, re.MULTILINE)
    assert all(f"{name}: nothing listens there" in shown.err for name in names)
    assert main(["logs", "gpt"]) == 0
    shown = capsys.readouterr()
    assert "step" in shown.out
    assert shown.err.count("warning: ") == 1, shown.err
    assert main(["cancel", "gpt"]) == EXIT_FAILED
    shown = capsys.readouterr()
    assert shown.err.count("error: ") == 1
    assert all(name in shown.err for name in names)
    while "warning: " not in follower.stdout.readline():
        assert follower.poll() is None
    for host in site.hosts:
        start_sshd(host, site)
    assert run_status(run).state == "running"
    assert [host.ranks() for host in site.hosts] == ranks
    end(site, run)
    output, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0, output
    assert f"step {Training(run.path).metrics[-1]['step']:>6}/100000" in output


@pytest.mark.full
def test_a_module_that_one_host_lacks_is_named_once_with_the_host(tmp_path: Path) -> None:
    modules = tmp_path / "host1" / "modules"  # which the other host does not see
    path = f"{Path(wanma.__file__).parents[1]}:{modules}"
    with ssh_hosts(tmp_path, 2, environment={"PYTHONPATH": path}) as site:
        modules.mkdir()
        (modules / "layers_of_this_machine.py").write_text("")
        (site.project / "own_model.py").write_text(MODEL)
        values = {
            **site.job().model_dump(exclude_unset=True),
            "model": {"factory": "own_model:build"},
            "data": {"factory": "own_model:Data"},
        }
        command = site.start(to_job(values), PYTHONPATH=path)
        output, _ = command.communicate(timeout=280)
        assert command.returncode == EXIT_USAGE, output + site.output()
        assert output.count("error: ") == output.count("'layers_of_this_machine', which is not inst") == 1
        assert f" on {site.hosts[1].name}\n" in output
        site.wait_until_idle()


@pytest.mark.full
def test_a_full_disk_of_a_host_stops_a_submission_with_its_path(site: SshSite, tmp_path: Path) -> None:
    small, host = tmp_path / "small", site.hosts[1]
    small.mkdir()
    (site.project / "large.py").write_text("#" * 1_000_000)
    host.enter("mount", "-t", "tmpfs", "tmpfs", str(small))
    wanted = site.job(cluster={"ssh": site.section(folder=str(small))})
    for size in ("8k", "600k", "1500k"):  # for the run's files, the archive of the code, the unpacked code
        host.enter("mount", "-o", f"remount,size={size}", str(small))
        with pytest.raises(WanmaError) as error:
            submit_job(wanted)
        assert error.value.message.startswith(f"{host.text}: the disk is full: {small}/"), size
        assert "cluster.ssh.folder" in error.value.hint
    site.wait_until_idle()
    host.enter("mount", "-o", "remount,size=100m", str(small))
    run, _ = submit_job(wanted)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "finished"


@pytest.mark.full(always=True)
def test_a_disk_that_becomes_full_is_told_and_costs_no_checkpoint(site: SshSite) -> None:
    first = site.hosts[0]
    folder = first.run_folder.parents[1]
    folder.mkdir()
    first.enter("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder))
    assert first.daemon is not None
    training = Training(Path(f"/proc/{first.daemon.pid}/root{first.run_folder}"))

    def newest() -> Path | None:
        return find_newest_valid(training.path / "checkpoints")

    run, _ = submit_job(site.job(steps=100_000, checkpoint={"every_steps": 20, "keep": 1}))
    site.wait_for(newest)
    first.enter("sh", "-c", f"cat /dev/zero >{folder}/filler || true")
    site.wait_for(lambda: run_status(run).reason)
    assert run_status(run).state == "running"
    assert run_status(run).reason.startswith(f"{first.text}: the disk is full: {first.run_folder}: ")
    site.wait_for(lambda: any("partial" in name for name in training.checkpoints()))
    kept = newest()
    assert kept is not None
    first.enter("rm", f"{folder}/filler")
    site.wait_for(lambda: newest() not in (None, kept))
    assert not run_status(run).reason
    end(site, run)
    assert newest() not in (None, kept)
