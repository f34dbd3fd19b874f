"""Runs on a cluster from the submission to the end, by the official client; pods are real processes."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from engines.kubernetes.conftest import TEXT, Site, losses
from support.kubernetes.cluster import IMAGE
from support.networks import free_port
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
from wanma.api.engines.submission import submit_job
from wanma.api.run.job_run import train_job
from wanma.checkpoint.remote.remote_storage import RemoteStorage
from wanma.cli.main import main
from wanma.engines.kubernetes.manifests import (
    KUEUE_PRIORITY_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    make_placement,
)
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.report.run_report import read_report


def test_two_pods_train_as_one_machine_and_their_records_come_home(site: Site) -> None:
    run, record = submit_job(site.job())
    assert attach(run, record) == 0
    assert run_status(run).state == "finished"
    assert "rank 1" in run_log_files(run, [1])[0].read_text()
    assert any("joined the run" in path.read_text() for path in run_log_files(run))
    alone = to_job({**site.job().model_dump(exclude_unset=True), "cluster": {"device": "cpu"}})
    assert train_job(alone, run_directory=site.folder / "alone") == 0
    other = type(run)(site.folder / "alone")
    assert losses(run) == pytest.approx(losses(other), rel=1e-4)
    engine, record = find_submitted(run)
    engine.discard(record.handle)
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.full
def test_servers_and_workers_of_two_pods_train_as_one_process(site: Site) -> None:
    values = site.job().model_dump(exclude_unset=True)
    values |= {"train": {**values["train"], "optimizer": "sgd"}, "parallel": {"dp_shard": 1}}
    spread = {"parallel": {"dp_shard": 1, "dp_replicate": 2}, "servers": {"count": 2}}
    run, record = submit_job(to_job({**values, **spread}))
    assert attach(run, record) == 0
    alone = to_job({**values, "cluster": {"device": "cpu"}})
    assert train_job(alone, run_directory=site.folder / "alone") == 0
    assert losses(run) == pytest.approx(losses(type(run)(site.folder / "alone")), abs=2e-6)


@pytest.mark.full
def test_a_run_prefers_the_node_that_has_read_its_data_before(site: Site) -> None:
    data = site.folder / "data"
    disks = [site.cluster.folder / "disks" / node for node in "ab"]
    for folder in (data, *(disk / str(data).lstrip("/") for disk in disks)):
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text(TEXT)
    nodes = []
    for name, place in (("first", {"node_selector": {"kubernetes.io/hostname": "b"}}), ("second", {})):
        values = site.job(nodes=1, host_paths=[str(data)], **place).model_dump(exclude_unset=True)
        values["data"] = {"text": [str(data)], "placement": "parts", "sequence_length": 32}
        values["observe"]["name"] = name
        run, record = submit_job(to_job(values))
        assert attach(run, record) == 0
        (pod,) = site.client.list("Pod", f"{RUN_LABEL}={record.handle['name']}")
        nodes.append(pod["spec"]["nodeName"])
    assert nodes == ["b", "b"]


@pytest.mark.full
@pytest.mark.parametrize("extensions", [()])
def test_without_jobsets_an_indexed_job_runs_the_same(site: Site) -> None:
    run, record = submit_job(site.job())
    assert attach(run, record) == 0
    assert record.handle["kind"] == "job"
    assert len(losses(run)) == 4


@pytest.mark.full
@pytest.mark.parametrize("grace_seconds", [None, 0], ids=["evicted", "killed"])
def test_a_pod_that_is_lost_is_made_anew_and_the_run_resumes(site: Site, grace_seconds: int | None) -> None:
    run, record = submit_job(site.job(steps=40))
    site.wait_for_step(run, 6)
    pods = site.client.list("Pod", f"{RUN_LABEL}={record.handle['name']}")
    site.client.delete("Pod", pods[-1]["metadata"]["name"], grace_seconds=grace_seconds)
    assert attach(run, record) == 0
    assert len(losses(run)) == 40


@pytest.mark.full
def test_a_cancelled_run_saves_leaves_nothing_and_resumes(site: Site) -> None:
    run, _ = submit_job(site.job(steps=60))
    site.wait_for_step(run, 2)
    cancel_run(run, is_immediate=False)
    assert site.wait_for_state(run, "cancelled").reason == ""
    site.wait(lambda: not site.objects(), "empty cluster")
    run, record = submit_job(site.job(steps=max(losses(run)) + 8))
    assert attach(run, record) == 0
    starts = [event for event in read_report(run).events if event["kind"] == "start"]
    assert starts[-1]["step"] > 0


@pytest.mark.full
def test_a_run_that_is_deleted_by_hand_is_cancelled(site: Site) -> None:
    run, record = submit_job(site.job(steps=400))
    site.wait_for_state(run, "running")
    site.client.delete("JobSet", record.handle["name"])
    assert "another hand" in site.wait_for_state(run, "cancelled").reason


@pytest.mark.full
def test_an_api_server_that_is_away_costs_nothing(site: Site) -> None:
    timers = [threading.Timer(3, site.cluster.stop), threading.Timer(23, site.cluster.start)]
    run, record = submit_job(site.job(steps=60))
    site.wait_for_step(run, 2)
    for timer in timers:
        timer.start()
    try:
        assert attach(run, record) == 0
    finally:
        for timer in timers:
            timer.join()
    assert len(losses(run)) == 60


@pytest.mark.full
def test_a_queue_without_room_is_explained_and_the_run_starts_when_there_is(site: Site) -> None:
    site.cluster.set_queue({"cpu": "1"}, name="team")
    run, record = submit_job(site.job(queue="team"))
    explanation = site.wait(
        lambda: found if "Kueue" in (found := explain_run(run)).summary else None, "reason of Kueue"
    )
    assert "quota" in explanation.summary
    assert run_status(run).state == "pending"
    site.cluster.set_queue({"cpu": "8"}, name="team")
    assert attach(run, record) == 0


@pytest.mark.full
@pytest.mark.parametrize("extensions", [None, ("kueue.x-k8s.io",)], ids=["jobset", "job"])
def test_a_run_that_kueue_preempts_waits_suspended_and_resumes_in_order(site: Site) -> None:
    site.cluster.set_queue({"cpu": "2"}, name="team", preemption="LowerPriority")
    no_restarts = {"max_restarts": 0}  # the loss of the nodes is no failure
    run, record = submit_job(site.job(steps=40, queue="team", cpu="1", cluster=no_restarts))
    site.wait_for_step(run, 6)
    site.cluster.add("priorityclasses", {"metadata": {"name": "high"}, "value": 100})
    site.cluster.add("jobs", _competitor("2"), "default")
    status = site.wait(
        lambda: found if "priority" in (found := run_status(run)).reason else None, "pre-emption"
    )
    assert status.state == "pending"
    site.wait(lambda: not site.client.list("Pod", f"{RUN_LABEL}={record.handle['name']}"), "end of the pods")
    assert "priority" in explain_run(run).summary
    assert run_status(run).state == "pending"
    site.client.delete("Job", "competitor")
    assert attach(run, record) == 0
    alone = to_job({**site.job(steps=40).model_dump(exclude_unset=True), "cluster": {"device": "cpu"}})
    assert train_job(alone, run_directory=site.folder / "alone") == 0
    assert losses(run) == pytest.approx(losses(type(run)(site.folder / "alone")), rel=1e-4)
    starts = [event["step"] for event in read_report(run).events if event["kind"] == "start"]
    assert len(starts) == 2
    assert starts[1] >= 6


@pytest.mark.full
def test_a_run_grows_by_idle_nodes_and_gives_them_to_who_has_a_higher_priority(site: Site) -> None:
    site.cluster.set_queue({"cpu": "1"}, name="team", preemption="LowerPriority")
    run, _ = submit_job(site.job(steps=100_000, nodes="1..2", queue="team", cpu="1"))

    def computes_on(nodes: int) -> bool:
        fetch_records(run)
        starts = [event for event in read_report(run).events if event["kind"] == "start"]
        return bool(
            starts and starts[-1]["nodes"] == nodes and max(losses(run), default=0) > starts[-1]["step"]
        )

    site.wait(lambda: computes_on(1), "run on one node, while the other waits in the queue")
    site.cluster.set_queue({"cpu": "2"}, name="team")
    site.wait(lambda: computes_on(2), "run on two nodes")
    site.cluster.add("priorityclasses", {"metadata": {"name": "high"}, "value": 100})
    site.cluster.add("jobs", _competitor("1"), "default")
    site.wait(lambda: computes_on(1), "run on the node that is left")
    assert run_status(run).state == "running"
    site.client.delete("Job", "competitor")
    site.wait(lambda: computes_on(2), "run on two nodes again")
    cancel_run(run, is_immediate=False)
    site.wait_for_state(run, "cancelled")
    assert sorted(losses(run)) == list(range(1, len(losses(run)) + 1))


def _competitor(cpu: str) -> dict[str, Any]:
    """Return a Job of a higher priority in the queue."""
    container = {"name": "main", "image": IMAGE, "command": ["sleep", "600"]}
    container["resources"] = {"requests": {"cpu": cpu}}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    labels = {QUEUE_LABEL: "team", KUEUE_PRIORITY_LABEL: "high"}
    return {"metadata": {"name": "competitor", "labels": labels}, "spec": {"template": {"spec": pod}}}


@pytest.mark.full
def test_a_gang_of_volcano_waits_whole_says_so_and_starts_whole(site: Site) -> None:
    container = {"name": "main", "image": IMAGE, "command": ["sleep", "600"]}
    container["resources"] = {"requests": {"cpu": "5"}}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container]}
    site.cluster.add("pods", {"metadata": {"name": "other"}, "spec": spec}, "default")
    run, record = submit_job(site.job(scheduler="volcano", cpu="5"))
    found = site.wait(
        lambda: found if "together" in (found := explain_run(run)).summary else None, "reason of Volcano"
    )
    assert "cpu" in found.summary
    assert run_status(run).state == "pending"
    pods = site.client.list("Pod", f"{RUN_LABEL}={record.handle['name']}")
    assert [pod["status"]["phase"] for pod in pods] == ["Pending", "Pending"]
    site.client.delete("Pod", "other")
    assert attach(run, record) == 0
    find_submitted(run)[0].discard(record.handle)
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.parametrize("extensions", [()])
def test_a_gang_without_volcano_is_refused(site: Site) -> None:
    with pytest.raises(JobError) as refused:
        submit_job(site.job(scheduler="volcano"))
    assert "cluster.kubernetes.scheduler" in refused.value.message


@pytest.mark.full
def test_a_run_gives_a_pod_back_and_gets_another_which_joins(site: Site) -> None:
    run, record = submit_job(site.job(steps=200, nodes="1..2"))
    assert len(record.handle["jobs"]) == 2

    def has_nodes(count: int) -> bool:
        fetch_records(run)
        starts = [event for event in read_report(run).events if event["kind"] == "start"]
        return bool(starts) and starts[-1]["nodes"] == count

    site.wait(lambda: has_nodes(2), "run on two nodes")
    resize_run(run, 1)
    site.wait(lambda: has_nodes(1), "run on one node")
    resize_run(run, 2)
    # It joins, or stands by if the remaining steps are too few to pay for a restart.
    site.wait(lambda: any("-3-" in name for name in run_status(run).nodes), "further pod")
    assert attach(run, find_submitted(run)[1]) == 0
    assert len(losses(run)) == 200


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"volume": "none"}, "cluster.kubernetes.volume"),
        ({"queue": "none"}, "cluster.kubernetes.queue"),
        ({"namespace": "none"}, "namespace"),
        ({"resource": "trainjob"}, "cluster.kubernetes.resource"),
        ({"node_selector": {"gpu": "h100"}}, "gpu=h100"),
    ],
)
def test_what_can_never_start_is_refused_and_leaves_nothing(
    site: Site, settings: dict[str, object], key: str
) -> None:
    with pytest.raises(WanmaError) as refused:
        submit_job(site.job(**settings))
    assert key in refused.value.message
    assert refused.value.hint
    assert refused.value.exit_code == EXIT_USAGE
    assert site.objects() == []


def test_an_image_that_is_missing_ends_the_wait(site: Site) -> None:
    with pytest.raises(WanmaError) as refused:
        submit_job(site.job(image="nowhere/none:1"))
    assert "image" in refused.value.message
    assert "cluster.kubernetes.image" in refused.value.hint
    assert refused.value.exit_code == EXIT_USAGE
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.full
def test_an_object_store_that_does_not_answer_is_one_message(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(WanmaError) as refused:
        submit_job(site.job(store="s3://bucket/runs"))
    assert "cluster.kubernetes.store" in refused.value.message
    assert refused.value.exit_code == EXIT_USAGE
    assert site.objects() == []


def test_missing_rights_are_one_message(site: Site) -> None:
    site.cluster.deny("create", "secrets")
    with pytest.raises(WanmaError) as refused:
        submit_job(site.job())
    assert "permission" in refused.value.message
    assert "--rbac" in refused.value.hint
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.full
def test_a_wait_beyond_the_limit_ends_with_its_reason(site: Site) -> None:
    site.cluster.set_quota({"requests.cpu": "3"})
    run, _ = submit_job(site.job(wait_seconds=3, cpu="2"))
    site.wait(lambda: not site.objects(), "empty cluster")  # nobody has asked
    status = run_status(run)
    assert status.state == "failed"
    assert "ResourceQuota" in status.reason


@pytest.mark.full
def test_a_limit_range_that_forbids_the_pods_is_the_reason_of_the_wait(site: Site) -> None:
    limits = [{"type": "Container", "max": {"cpu": "1"}}]
    site.cluster.add("limitranges", {"metadata": {"name": "small"}, "spec": {"limits": limits}}, "default")
    run, record = submit_job(site.job(cpu="2"))
    found = site.wait(
        lambda: found if "forbids" in (found := explain_run(run)).summary else None, "reason of the server"
    )
    assert "maximum cpu usage per Container is 1" in found.summary
    assert any("cluster.kubernetes" in line for line in found.advice)
    find_submitted(run)[0].discard(record.handle)
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.full
def test_a_lost_answer_makes_no_second_object(site: Site) -> None:
    site.cluster.lose_answers(3)
    run, _ = submit_job(site.job())
    assert len([name for name in site.objects() if name.startswith("JobSet")]) == 1
    run.engine.unlink()
    with pytest.raises(WanmaError) as refused:
        submit_job(site.job())
    assert "has not ended" in refused.value.message
    site.client.delete("JobSet", make_placement(run.path, site.job().cluster.kubernetes).name)
    site.wait(lambda: not site.objects(), "empty cluster")


@pytest.mark.full
def test_a_run_directory_on_the_volume_is_read_where_it_is(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = site.cluster.claim_folder("runs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text((site.folder / "text.txt").read_text())
    monkeypatch.chdir(folder)
    run, record = submit_job(site.job(mount_path=str(folder)))
    assert attach(run, record) == 0
    assert list(run.checkpoints.glob("step-*"))
    assert not list(run.engine_files.glob("kubernetes-fetched"))


@pytest.fixture
def store(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Settings of an object store in place of the volume, which this machine and the pods reach."""
    s3fs, server = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    address = site.cluster.kubelets.network.gateway
    s3 = server.ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    s3.start()
    url = f"http://{address}:{s3.get_host_and_port()[1]}"
    variables = {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
    site.client.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": variables}, "token"
    )
    references = {name: f"s3/{name}" for name in variables}
    try:
        yield {"store": "s3://bucket/runs", "secret_environment": references}
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        s3.stop()


@pytest.mark.full
def test_an_object_store_keeps_a_run_whose_pods_have_no_volume(site: Site, store: dict[str, Any]) -> None:
    run, record = submit_job(site.job(steps=72, **store))
    site.wait_for_step(run, 6)
    pods = site.client.list("Pod", f"{RUN_LABEL}={record.handle['name']}")
    first = next(pod for pod in pods if pod["spec"]["hostname"].endswith("-0"))
    site.client.delete("Pod", first["metadata"]["name"], grace_seconds=0)
    assert attach(run, record) == 0
    alone = to_job({**site.job(steps=72).model_dump(exclude_unset=True), "cluster": {"device": "cpu"}})
    assert train_job(alone, run_directory=site.folder / "alone") == 0
    reference, found = losses(type(run)(site.folder / "alone")), losses(run)
    assert found == pytest.approx({step: reference[step] for step in found}, rel=1e-4)
    starts = [event["step"] for event in read_report(run).events if event["kind"] == "start"]
    missing = reference.keys() - found.keys()  # steps since the last copy of the pod that was killed
    assert missing <= set(range(7, starts[1] + 1))
    assert "rank 1" in run_log_files(run, [1])[0].read_text()
    run, record = submit_job(site.job(steps=76, **store))  # all pods are new
    assert attach(run, record) == 0
    assert set(losses(run)) == {*found, 73, 74, 75, 76}
    starts = [event["step"] for event in read_report(run).events if event["kind"] == "start"]
    assert starts[-1] == 72
    find_submitted(run)[0].discard(find_submitted(run)[1].handle)
    assert not RemoteStorage(store["store"]).list_folders()


def test_a_plan_is_made_for_the_nodes_that_are_there(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder / "job.toml").write_text(job_to_toml(site.job()))
    assert main(["plan", "job.toml", "--engine", "kubernetes", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["cluster"]["nodes"]
    assert group["count"] == 2
    assert group["cores"] == 8


def test_what_is_rendered_is_what_a_dry_run_shows(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    (site.folder / "job.toml").write_text(job_to_toml(site.job()))
    assert main(["render", "job.toml"]) == 0
    rendered = capsys.readouterr().out
    assert main(["train", "job.toml", "--dry-run"]) == 0
    assert "kind: JobSet" in rendered
    assert rendered.strip() in capsys.readouterr().out
