"""The SSH engine on real hosts: each has its own sshd, address, files and shared memory."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from support.command import Training
from support.frameworks import SCRIPTS
from support.object_store import object_store
from support.ssh import CALLER_ADDRESS, SshSite, ssh_hosts, start_sshd
from support.wheels import make_wheel
from wanma.api.engines.attachment import attach
from wanma.api.engines.control import (
    cancel_run,
    explain_run,
    fetch_records,
    find_submitted,
    resize_run,
    run_log_files,
    run_status,
)
from wanma.api.engines.script_submission import submit_script
from wanma.api.engines.submission import submit_job
from wanma.api.run.job_run import train_job
from wanma.engines.hosts.connections import Connections, Host, HostError, Reply
from wanma.engines.ssh.engine import SshEngine
from wanma.engines.ssh.placement import PlacedNode
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.job import Job

SECRET = "a-secret-that-nobody-guesses"


def overrides_of(section: ClusterSection) -> list[str]:
    """Return the keys of a section as `wanma launch --set` takes them."""
    ssh = section.ssh
    return [
        "cluster.engine=ssh",
        f"cluster.nodes={section.nodes}",
        f"cluster.ssh.hosts={json.dumps(ssh.hosts)}",
        f"cluster.ssh.python={ssh.python}",
        f"cluster.ssh.options={json.dumps(ssh.options)}",
    ]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_two_hosts_train_as_one_machine_and_the_records_come_home(site: SshSite, tmp_path: Path) -> None:
    command = site.start(site.job(), WANMA_SECRET=SECRET)
    output, _ = command.communicate(timeout=280)
    assert command.returncode == 0, output + site.output()
    assert "this command holds the run, which ends with it" in output
    assert "step 4/4" in output
    alone = to_job(
        {
            **site.job().model_dump(exclude_unset=True),
            "cluster": {"engine": "local"},
            "observe": {"name": "alone", "console": "quiet"},
        }
    )
    assert train_job(alone, run_directory=tmp_path / "alone") == 0
    run = site.project / "runs" / "gpt"
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-6)
    assert {path.name for path in (run / "logs").glob("*.log")} == {"rank-0.log", "rank-1.log"}
    assert (run / "report.html").is_file()
    assert list((run / "checkpoints").iterdir()) == []
    folders = [host.home / ".wanma" / "runs" / "gpt" / "checkpoints" for host in site.hosts]
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["step-00000004"], []]
    for folder in (site.project, *(host.folder for host in site.hosts)):
        for path in (path for path in folder.rglob("*") if path.is_file()):
            assert SECRET.encode() not in path.read_bytes(), path
    site.wait_until_idle()


@pytest.mark.full
def test_a_detached_run_goes_on_is_cancelled_with_a_checkpoint_and_resumes(
    site: SshSite, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = submit_job(site.job(steps=100_000))
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2)
    assert run_status(run).state == "running"
    assert run_status(run).nodes == tuple(host.text for host in site.hosts)
    with pytest.raises(WanmaError, match="is running already"):
        submit_job(site.job())
    assert explain_run(run).summary == "nothing blocks it: the run is running"
    with pytest.raises(WanmaError, match="and 1 lies outside"):
        resize_run(run, 1)
    assert cancel_run(run, is_immediate=False).state == "running"
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled", site.output()
    fetch_records(run)
    stopped = len(losses(run.path))
    run, record = submit_job(site.job(steps=stopped + 2))
    assert attach(run, record) == 0
    shown = capsys.readouterr().out
    assert f"resuming from step {stopped:,} of {stopped + 2:,}" in shown, shown
    assert "its checkpoints are on the hosts; to copy them here: rsync -a -e" in shown
    assert "step" in run_log_files(run, [1])[0].read_text()
    assert [path.name for path in run_log_files(run)] == ["output-1.log", "output-0.log"]
    site.wait_until_idle()


@pytest.mark.full
def test_nothing_is_left_on_the_hosts_when_the_caller_is_killed(site: SshSite) -> None:
    command = site.start(site.job(steps=100_000))
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2 or command.poll() is not None)
    assert command.poll() is None, command.communicate()[0] + site.output()
    assert all(host.processes() for host in site.hosts)
    command.kill()
    site.wait_until_idle(90)
    command.communicate()
    (checkpoint,) = site.hosts[0].home.glob(".wanma/runs/gpt/checkpoints/step-*")
    assert (checkpoint / "manifest.json").is_file()
    assert run_status(RunDirectory(site.project / "runs" / "gpt")).state == "cancelled"


@pytest.mark.full
def test_the_first_ctrl_c_stops_with_a_checkpoint(site: SshSite) -> None:
    command = site.start(site.job(steps=100_000))
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2 or command.poll() is not None)
    assert command.poll() is None, command.communicate()[0] + site.output()
    command.send_signal(signal.SIGINT)
    output, _ = command.communicate(timeout=120)
    assert command.returncode == 130, output
    assert "stopping after the current step, with a checkpoint" in output
    assert len(list(site.hosts[0].home.glob(".wanma/runs/gpt/checkpoints/step-*"))) == 1
    site.wait_until_idle()


@pytest.mark.full(always=True)
def test_the_run_goes_on_when_one_of_its_hosts_is_lost(site: SshSite) -> None:
    wanted = site.job(nodes="1..2", steps=100_000, cluster={"last_call_timeout_seconds": 60})
    run, _ = submit_job(wanted)
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 5)
    site.hosts[1].kill()
    before = site.hosts[0].training.steps_begun()
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > before + 20)
    status = run_status(run)
    assert status.state == "running"
    assert re.search(rf"{site.hosts[1].text}: it (cannot be reached|gave no answer)", status.reason)
    explanation = explain_run(run)
    assert explanation.summary.endswith(f"do not answer: {site.hosts[1].text}")
    engine, record = find_submitted(run)
    engine.cancel(record.handle, is_immediate=False)
    site.wait_for(lambda: not site.hosts[0].processes())


@pytest.mark.full(always=True)
def test_with_claims_the_run_survives_its_first_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is shared but an object store."""
    with (
        object_store(monkeypatch, CALLER_ADDRESS) as store,
        ssh_hosts(tmp_path, 2, environment=store.environment) as site,
    ):
        monkeypatch.chdir(site.project)
        wanted = site.job(
            nodes="1..2",
            steps=100_000,
            checkpoint={"in_memory_every_steps": 1},
            cluster={"claims": store.url("run"), "last_call_timeout_seconds": 60},
        )
        run, record = submit_job(wanted)
        site.wait_for(lambda: site.hosts[0].training.steps_begun() > 5)
        engine, _ = find_submitted(run)
        engine.fetch(record.handle)
        fetched = len(losses(run.path))
        site.hosts[0].kill()
        site.wait_for(lambda: site.hosts[1].training.steps_begun() > 5)
        assert run_status(run).state == "running"
        cancel_run(run, is_immediate=False)
        assert attach(run, record) == 130
        shown = capsys.readouterr().out
        assert "node 0 (gpu1) was lost" in shown
        assert "gpu2 now runs the coordinator" in shown
        steps = [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps))
        assert steps[:fetched] == list(range(1, fetched + 1))
        [recovery] = [event for event in Training(run.path).events if event["kind"] == "recovery"]
        assert recovery["step"] + 1 in steps
        assert f"interrupted at step {steps[-1]:,}" in shown
        assert "gpu2:" in shown.partition("to copy them here:")[2]


@pytest.mark.full
def test_a_run_grows_to_a_further_host_and_shrinks(site: SshSite) -> None:
    site.hosts[1].stop_sshd()
    wanted = site.job(nodes="1..2", steps=100_000, cluster={"last_call_timeout_seconds": 1})
    run, record = submit_job(wanted)
    assert [note for note in record.notes if "left out: root@gpu2:2222" in note]
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2)
    with pytest.raises(WanmaError, match=r"root@gpu2:2222: nothing listens there"):
        resize_run(run, 2)
    start_sshd(site.hosts[1], site)
    resize_run(run, 2)
    assert run_status(run).nodes == tuple(host.text for host in site.hosts)
    site.wait_for(lambda: "on 2 nodes" in site.output())
    resize_run(run, 1)
    site.wait_for(lambda: not site.hosts[1].processes())
    before = site.hosts[0].training.steps_begun()
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > before + 2)
    status = run_status(run)
    assert (status.state, status.nodes) == ("running", (site.hosts[0].text,))
    cancel_run(run, is_immediate=False)
    site.wait_for(lambda: run_status(run).is_over)
    assert run_status(run).state == "cancelled"
    site.wait_until_idle()


@pytest.mark.full
def test_a_run_resumes_when_another_host_is_the_first_one(
    site: SshSite, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach(*submit_job(site.job(steps=2))) == 0
    assert "finished at step 2" in capsys.readouterr().out, site.output()
    site.hosts.reverse()
    assert attach(*submit_job(site.job(steps=4))) == 0
    shown = capsys.readouterr().out
    assert "resuming from step 2 of 4" in shown, shown + site.output()
    assert "step-00000002 was on the node of rank 1, and has been copied to that of rank 0" in shown
    folder = site.hosts[0].home / ".wanma" / "runs" / "gpt" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]
    assert not list(site.folder.rglob("copied"))
    site.wait_until_idle()


@pytest.mark.full
def test_a_script_runs_on_the_hosts(site: SshSite) -> None:
    (site.project / "tool").mkdir()
    (site.project / "tool" / "script.py").write_text(
        "import os, socket\n"
        "text = open('corpus.txt').read(9)\n"
        "print(f\"{socket.gethostname()} rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {text}\")\n"
    )
    section = site.job().cluster
    words = ["--ranks=1", *(f"--set={text}" for text in overrides_of(section)), "tool/script.py"]
    run, record = submit_script("script", words, 1, section, None)
    assert attach(run, record) == 0, site.output()
    texts = [path.read_text() for path in sorted((run.path / "logs").glob("rank-*.log"))]
    assert ["gpu1 rank 0 of 2: the quick" in texts[0], "gpu2 rank 1 of 2: the quick" in texts[1]] == [
        True,
        True,
    ]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_ranks_of_mpi_are_one_gang_on_hosts_that_cannot_log_in_to_each_other(site: SshSite) -> None:
    (site.project / "script.py").write_bytes((SCRIPTS / "mpi_sum.py").read_bytes())
    section = site.job().cluster
    options = [f"--set={text}" for text in overrides_of(section)]
    words = ["--ranks=2", *options, "--framework=mpi", "script.py"]
    run, record = submit_script("script", words, 2, section, None)
    assert attach(run, record) == 0, site.output()
    for rank in range(4):
        text = run.rank_log(rank).read_text()
        assert f"process {rank} of 4: sum 10\nlocal rank {rank % 2}, hidden []\n" in text
    site.wait_until_idle()


@pytest.mark.full
@pytest.mark.timeout(600)  # three environments
def test_hosts_make_the_environment_of_a_lock_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ssh_hosts(tmp_path, 2, has_wanma=False) as site:
        monkeypatch.chdir(site.project)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        make_wheel(site.project / "wheels", "tiny", "1.0")
        lock = site.project / "requirements.lock"
        lock.write_text("--no-index\n--find-links wheels\ntiny==2.0\n")
        (site.project / "script.py").write_text(
            "import os, socket, tiny, wanma\n"
            "print(socket.gethostname(), os.environ['RANK'], tiny.VERSION, wanma.__file__)\n"
        )
        keys = {"environment": "requirements.lock", "system_site_packages": True}
        section = site.job(cluster=keys).cluster
        options = [*overrides_of(section), "cluster.environment=requirements.lock"]
        options += ["cluster.system_site_packages=true"]
        words = ["--ranks=1", *(f"--set={text}" for text in options), "script.py"]
        first = site.section(hosts=[site.hosts[0].text])
        error = refusal(site.job(nodes=1, cluster={**keys, "ssh": first}))
        assert f"{site.hosts[0].text}: the environment of requirements.lock cannot be made" in error.message
        assert "No matching distribution found for tiny==2.0" in error.message
        capsys.readouterr()

        lock.write_text("--no-index\n--find-links wheels\ntiny==1.0\n")
        run, record = submit_script("script", words, 1, section, None)
        assert attach(run, record) == 0
        said = capsys.readouterr().err
        assert "installing 1 package of requirements.lock on root@gpu" in said
        names = ", ".join(host.text for host in site.hosts)
        assert f"environment of requirements.lock is ready on {names} (" in said
        for host, log in zip(site.hosts, sorted((run.path / "logs").glob("rank-*.log")), strict=True):
            (place,) = (host.home / ".wanma" / "environments").glob("*-*/complete.json")
            assert f"{host.name} {host.number - 1} 1.0 {place.parent}/lib" in log.read_text()
        assert [path.suffix for path in run.code.glob("environment-*")] == [".tar"]
        assert json.loads((run.code / "commit.json").read_text())["snapshot"] == record.handle["digest"]

        site.wait_until_idle()
        found = SshEngine().discover(section)
        assert found is not None
        assert found.free_nodes == 2
        assert capsys.readouterr().err == ""


@pytest.mark.full
def test_cancel_now_ends_a_run_at_once_and_leaves_no_process(site: SshSite) -> None:
    run, _ = submit_job(site.job(steps=100_000))
    site.wait_for(lambda: site.hosts[0].training.steps_begun() > 2)
    cancel_run(run, is_immediate=True)
    site.wait_until_idle(30)
    assert run_status(run).state == "cancelled"


def test_hosts_with_other_settings_of_ssh_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Barrier(2)

    class Silent(Connections):
        def ask(self, *_: Any, **__: Any) -> Reply:
            raise AssertionError("asked by itself")

        def ask_all(self, questions: Mapping[Host, object]) -> tuple[dict[Host, Reply], list[HostError]]:
            both.wait(60)
            return {}, [HostError(host, f"{host.text}: it cannot be reached", "") for host in questions]

    monkeypatch.setattr(SshEngine, "_connect", lambda *_: Silent())
    nodes = [PlacedNode(Host(name, name), name, 0, "/run", "") for name in ("gpu1", "gpu2")]
    handles = [{"nodes": [node.to_json()], "python": node.hostname, "options": []} for node in nodes]
    statuses = SshEngine().statuses([{**handle, "requeue_exit_code": 143} for handle in handles])
    assert [(status.state, status.nodes) for status in statuses] == [
        ("unknown", ("gpu1",)),
        ("unknown", ("gpu2",)),
    ]


def refusal(wanted: Job) -> WanmaError:
    with pytest.raises(WanmaError) as error:
        SshEngine().discover(wanted.cluster)
    return error.value


def test_hosts_are_the_planners_cluster_and_failures_are_named(site: SshSite) -> None:
    found = SshEngine().discover(site.job().cluster)
    assert found is not None
    (group,) = found.cluster.nodes
    assert (group.count, group.hosts) == (2, tuple(host.text for host in site.hosts))
    assert (found.free_nodes, found.max_nodes) == (2, 2)

    one, two = site.hosts
    section = site.section(hosts=[one.text, f"root@{two.name}:2223"])
    error = refusal(site.job(cluster={"ssh": section}))
    assert error.message == "root@gpu2:2223: nothing listens there: connection refused"

    error = refusal(site.job(cluster={"ssh": site.section(hosts=[one.text, "nowhere.invalid"])}))
    assert "nowhere.invalid: its name is not known here" in error.message

    other_key = site.folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other_key)], check=True)
    section = site.section(options=["-oIdentityFile=none", "-i", str(other_key), *site.options])
    config = Path(site.options[1])
    config.write_text(config.read_text().replace(f"{site.folder}/key", str(other_key)))
    error = refusal(site.job(cluster={"ssh": section}))
    assert error.message.splitlines()[0] == "0 hosts are usable, and the run needs 2:"
    assert "root@gpu1:2222: it refused the login" in error.message
    assert "ssh-copy-id root@gpu1:2222" in error.hint
    config.write_text(config.read_text().replace(str(other_key), f"{site.folder}/key"))

    known = site.folder / "known_hosts"
    keys = known.read_text().splitlines()
    known.write_text(keys[0] + "\n")
    assert "root@gpu2:2222: its host key is unknown here" in refusal(site.job()).message
    known.write_text(f"{keys[0]}\n{keys[1].split()[0]} {' '.join(keys[0].split()[1:])}\n")
    assert "root@gpu2:2222: its host key has changed" in refusal(site.job()).message
    known.write_text("\n".join(keys) + "\n")

    error = refusal(site.job(cluster={"ssh": site.section(python="/nowhere/python3")}))
    assert "root@gpu1:2222: the interpreter /nowhere/python3 cannot be started" in error.message
    bare = site.folder / "bare-python"
    bare.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    error = refusal(site.job(cluster={"ssh": site.section(python=str(bare))}))
    assert "root@gpu1:2222: wanma is not installed for" in error.message
    assert "-m pip install wanma==" in error.hint

    site.hosts[1].stop_sshd()
    assert "root@gpu2:2222: nothing listens there" in refusal(site.job()).message
    found = SshEngine().discover(site.job(nodes="1..2").cluster)
    assert found is not None
    assert (found.free_nodes, found.max_nodes) == (1, 2)
    assert "left out: root@gpu2:2222: nothing listens there: connection refused" in found.notes
    start_sshd(site.hosts[1], site)


def test_what_stops_a_submission_is_named_and_leaves_nothing(site: SshSite) -> None:
    one, two = site.hosts
    (one.home / "file").write_text("")
    with pytest.raises(
        WanmaError, match=r"root@gpu1:2222: cannot write .*file.*: (Not a directory|File exists)"
    ):
        submit_job(site.job(cluster={"ssh": site.section(folder=str(one.home / "file"))}))
    with pytest.raises(WanmaError, match=r"'eth9': root@gpu1:2222 has no such interface(.|\n)*eth0, lo"):
        submit_job(site.job(cluster={"network_interface": "eth9"}))
    with pytest.raises(WanmaError) as error:
        submit_job(site.job(cluster={"network_interface": "lo"}))
    assert "no address of root@gpu1:2222 is reached by all other hosts" in error.value.message
    assert "root@gpu2:2222 tried 127.0.0.1 (Connection refused)" in error.value.message
    origin = one.home / ".wanma" / "runs" / "gpt" / "engine" / "origin.json"
    origin.write_text(json.dumps(["/another/runs/gpt", "laptop"]))
    with pytest.raises(WanmaError, match="belongs to another run, /another/runs/gpt on laptop"):
        submit_job(site.job())
    site.wait_until_idle()
    assert two.processes() == []
