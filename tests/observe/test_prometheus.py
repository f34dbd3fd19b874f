"""A run as a real Prometheus sees it, and its alerts as a real Alertmanager passes them on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import requests

from support.command import Desk, Training, end_commands
from support.dashboards import served_dashboard
from support.networks import free_port
from support.nodes import Machines
from support.prometheus import Prometheus, has_prometheus, running_prometheus
from support.waiting import wait_until
from support.webhook import Webhook
from wanma.observe.alerts.rules import RULES
from wanma.observe.endpoint import MetricsEndpoint
from wanma.observe.render.dashboards import dashboards
from wanma.observe.render.files import render_files
from wanma.observe.series.catalogue import CATALOGUE, RUN_LABELS
from wanma.observe.series.run_series import Sample

pytestmark = [
    pytest.mark.full(always=True),
    pytest.mark.skipif(not has_prometheus, reason="prometheus or prometheus-alertmanager is not installed"),
]
NVML = Path(__file__).parents[1] / "support" / "native" / "nvml.cpp"
ABSENT = re.compile("wanma_(load_seconds|(forecast_)?bubble|forecast_gpu_memory|forecast_power)")
"""Metrics that a run of text on CPUs without a pipeline, whose power is unknown, has not."""
DEVICE_HOLDER = """\
import os
if "DEVICE" in os.environ:
    FILE = os.open(os.environ["DEVICE"], os.O_RDONLY)
"""
"""Module `sitecustomize`: each process has the device file of a GPU open, as one that uses it has."""


def panel_queries() -> list[str]:
    """Return the queries of all panels, for the run `text`."""
    panels = [panel for dashboard in dashboards().values() for panel in dashboard["panels"]]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) >= len(panels) / 2
    return [
        query.replace("$run", "text").replace("$job", "text").replace("$__rate_interval", "10s")
        for query in queries
    ]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    yield Desk(tmp_path, Path(__file__).parent)
    end_commands()


@pytest.fixture
def training(desk: Desk) -> Training:
    desk.start("train", "text.toml", "train.steps=100000", "--metrics-port", "0")
    training = desk.training("runs/text")
    wait_until(lambda: training.steps_begun() > 3, "some steps")
    return training


@pytest.fixture
def prometheus(desk: Desk, tmp_path: Path) -> Iterator[Prometheus]:
    render_files(tmp_path / "monitoring", desk.folder / "runs", "http://localhost")
    with running_prometheus(tmp_path, tmp_path / "monitoring") as running:
        yield running


def all_samples() -> list[Sample]:
    """Return a sample of each metric."""
    return [
        Sample(metric.name, tuple((label, "data") for label in metric.labels if label not in RUN_LABELS), 1.0)
        for metric in CATALOGUE.values()
    ]


def test_all_metrics_pass_the_check_of_prometheus() -> None:
    with MetricsEndpoint("127.0.0.1", 0, "", all_samples, {"run": "text"}) as endpoint:
        text = requests.get(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=20).content
    for metric in CATALOGUE.values():
        assert f"{metric.full_name}{{".encode() in text
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_prometheus_asks_the_dashboard_for_the_endpoints_and_sends_their_token(tmp_path: Path) -> None:
    runs, token = tmp_path / "runs", tmp_path / "token"
    token.write_text("secret\n")
    endpoint = MetricsEndpoint("0.0.0.0", 0, "secret", all_samples, {"run": "text"})
    with endpoint, served_dashboard(runs) as address:
        endpoint.announce(runs, "text-0", {"host": "one", "job": "gpt"})
        render_files(
            tmp_path / "m", tmp_path / "elsewhere", "http://localhost",
            token_file=token, targets_url=f"{address}/targets",
        )  # fmt: skip
        with running_prometheus(tmp_path, tmp_path / "m") as prometheus:
            wait_until(lambda: prometheus.query("wanma_up"), "the endpoint")
            (target,) = prometheus.query("up == 1")
            assert (target["metric"]["host"], target["metric"]["job"]) == ("one", "gpt")
            assert target["metric"]["instance"] == f"{socket.gethostname()}:{endpoint.port}"
            token.write_text("another")
            wait_until(lambda: prometheus.value("up") == 0, "the refusal of another token")


def test_rules_pass_the_check_of_prometheus(tmp_path: Path) -> None:
    render_files(tmp_path, tmp_path / "runs", "http://localhost")
    subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "prometheus" / "wanma-rules.yml")], check=True
    )


def test_each_rule_and_panel_reads_a_run_with_several_targets(tmp_path: Path) -> None:
    """Two nodes, and a resumed run whose earlier target is still there, have the same series."""
    runs = tmp_path / "runs"
    render_files(tmp_path / "m", runs, "http://localhost")
    with ExitStack() as stack:
        for name in ("text-0", "text-1"):
            endpoint = MetricsEndpoint("127.0.0.1", 0, "", all_samples, {"run": "text"})
            endpoint.announce(runs, name, {"host": name, "job": "text"})
            stack.enter_context(endpoint)
        prometheus = stack.enter_context(running_prometheus(tmp_path, tmp_path / "m"))
        wait_until(lambda: len(prometheus.query("wanma_up")) == 2, "both targets")
        for rule in RULES:
            prometheus.query(rule.condition.promql)  # an error of matching raises
        for query in panel_queries():
            keys = [series["metric"].keys() for series in prometheus.query(query)]
            assert not any(key & {"instance", "host"} for key in keys if "alertname" not in key), query
        (series,) = prometheus.query('wanma_loss{host="text-0"}')
        assert (series["metric"]["run"], series["metric"]["job"]) == ("text", "text")
        assert "exported_job" not in series["metric"]


def test_counters_equal_the_records(training: Training, prometheus: Prometheus) -> None:
    wait_until(lambda: prometheus.value("wanma_completed_steps"), "the first reading")
    rank = training.rank_process(0)
    assert rank is not None
    os.kill(rank, signal.SIGSTOP)
    try:
        newest = training.metrics[-1]
        wait_until(lambda: prometheus.value("wanma_completed_steps") == newest["step"], "the newest step")
        records = training.metrics
        assert prometheus.value("wanma_loss") == pytest.approx(newest["loss"])
        assert prometheus.value("wanma_steps_total") == len(records) - 1
        for phase in newest["phases"]:
            total = sum(record["phases"].get(phase, 0.0) for record in records[1:])
            assert prometheus.value(f'wanma_phase_seconds_total{{phase="{phase}"}}') == pytest.approx(total)
        wait_until(lambda: len(prometheus.query("wanma_rank_up == 1")) == 2, "both ranks")
    finally:
        os.kill(rank, signal.SIGCONT)


def test_two_nodes_have_the_series_of_their_ranks(desk: Desk, prometheus: Prometheus) -> None:
    words = ("text.toml", "train.steps=100000", "cluster.nodes=2", "parallel.dp_replicate=4")
    machines = Machines(desk, "runs/text", *words, "observe.metrics_port=0")
    for node in range(2):
        machines.start(node)
    wait_until(lambda: len(prometheus.query("wanma_rank_steps_total > 0")) == 4, "steps of four ranks")
    ranks = [series["metric"] for series in prometheus.query("wanma_rank_up == 1")]
    assert sorted((rank["node"], rank["rank"]) for rank in ranks) == [
        ("0", "0"), ("0", "1"), ("1", "2"), ("1", "3"),
    ]  # fmt: skip
    wait_until(lambda: prometheus.query("wanma_loss"), "the loss")
    assert len(prometheus.query("wanma_loss")) == 1, "node 0 alone has those of the run"
    assert {series["metric"]["node"] for series in prometheus.query("wanma_node_cpus")} == {"0", "1"}
    machines.lose(1)
    wait_until(lambda: not prometheus.query('{node="1"}'), "the end of the lost node's series")


@pytest.fixture
def device() -> Iterator[Path]:
    path = Path(f"/dev/nvidia-of-test-{os.getpid()}")
    path.touch()
    yield path
    path.unlink()


@pytest.mark.root
def test_every_panel_has_its_series(desk: Desk, device: Path, prometheus: Prometheus) -> None:
    """A mixture of experts with forecast, checkpoints, validation and a GPU, and an alert that fires."""
    library, readings = desk.folder / "libnvidia-ml.so.1", desk.folder / "readings"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, NVML], check=True)
    readings.write_text("95 0 0 79")  # XID 79: the alert GpuError
    (desk.folder / "sitecustomize.py").write_text(DEVICE_HOLDER)
    running = desk.start(
        "train", "text.toml", "train.steps=100000", "model.experts=4", "train.validate_every_steps=20",
        "observe.gradient_norms_every_steps=5", "checkpoint.every_steps=20", "--metrics-port", "0",
        "cluster.device=cpu", "train.deterministic=false",
        PYTHONPATH=str(desk.folder), CUDA_VISIBLE_DEVICES="", LD_LIBRARY_PATH=str(desk.folder),
        NVML_READINGS=str(readings), DEVICE=str(device), WANMA_MEASURE_CPU="1",
    )  # fmt: skip

    def has_begun() -> bool:
        assert running.process.poll() is None, running.end().text
        return bool(prometheus.query("wanma_validation_loss") and prometheus.query("ALERTS"))

    wait_until(has_begun, "a validation and an alert")
    missing = {query for query in panel_queries() if not ABSENT.search(query)}

    def all_seen() -> bool:
        for query in sorted(missing):
            series = prometheus.query(query)
            if series and all(entry["value"][1] != "NaN" for entry in series):
                missing.discard(query)
        return not missing

    with suppress(AssertionError):
        wait_until(all_seen, "series of all panels", 60)
    assert missing == set()


def test_an_alert_of_prometheus_reaches_a_webhook(training: Training, desk: Desk, tmp_path: Path) -> None:
    manager = f"http://127.0.0.1:{free_port()}"
    render_files(tmp_path / "m", desk.folder / "runs", "http://localhost", alertmanager_url=manager)
    rules = tmp_path / "m" / "prometheus" / "wanma-rules.yml"
    model = json.loads(rules.read_text())
    for rule in model["groups"][0]["rules"]:
        rule["for"] = "0s"
        if rule["alert"] == "DiskFull":
            assert rule["expr"].endswith("< 0.05)")
            rule["expr"] = rule["expr"].replace("< 0.05)", "< 2)")
    rules.write_text(json.dumps(model))
    with Webhook() as webhook, running_prometheus(tmp_path, tmp_path / "m", webhook.url):
        (alert,) = json.loads(webhook.wait())["alerts"]
        assert [alert["labels"][name] for name in ("alertname", "run", "job")] == ["DiskFull", "text", "text"]
    assert training.steps_begun()


def test_the_runs_own_alert_reaches_a_webhook(desk: Desk) -> None:
    with Webhook() as webhook:
        desk.start(
            "train", "text.toml", "train.learning_rate=1000", "train.optimizer=sgd", "train.gradient_clip=0",
            "train.non_finite=skip", "observe.alert_webhook=env:HOOK", HOOK=webhook.url,
        )  # fmt: skip
        event = json.loads(webhook.wait())
        # Ten skipped steps end the run, perhaps before its supervisor has looked twice.
        assert event["alert"] in ("LossNotFinite", "RunFailed")
        assert (event["run"], event["job"], event["is_firing"]) == ("text", "text", True)
