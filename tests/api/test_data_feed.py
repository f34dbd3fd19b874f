"""Data feed of a job on images in a store: from the files to the plan, its JSON and the dry run."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.labelled_images import write_tar
from support.s3_server import s3_server
from wanma.data.stores import store_probe
from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.file.loading import to_job
from wanma.job.sections.job import Job
from wanma.planner.preparation.job_planning import note_level, plan_notes
from wanma.planner.presentation.json_output import analysis_json
from wanma.planner.presentation.plan_analysis import PlanAnalysis, analyze_plan
from wanma.planner.presentation.terminal_tables import render_analysis

COUNT = 30
CLUSTER = '[[nodes]]\ndevice = "H100 SXM"\nstore_gb_per_second = 0.001\nstore_latency_milliseconds = 20\n'


@pytest.fixture
def image_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job on images in a store, and the bytes of a sample."""
    write_tar(tmp_path, COUNT)
    monkeypatch.setattr(store_probe, "MAX_WAIT_SECONDS", 600.0)
    with s3_server(monkeypatch) as server:
        sizes = [len(path.read_bytes()) for path in sorted(tmp_path.glob("*.tar"))]
        for path in sorted(tmp_path.glob("*.tar")):
            server.put(f"images/{path.name}", path.read_bytes())
        keys = {"images": ["s3://bucket/images"], "cache": str(tmp_path / "cache"), "validation_fraction": 0}
        yield (
            to_job(
                {
                    "model": {"preset": "cifar-convnet"},
                    "data": {**keys, "image_transform": {"size": 24}},
                    "train": {"steps": 2, "global_batch": 16},
                    "parallel": {"dp_replicate": 8},
                }
            ),
            sum(sizes) / COUNT,
        )


def analyzed(job: Job, folder: Path, text: str = CLUSTER) -> PlanAnalysis:
    (folder / "cluster.toml").write_text(text)
    return analyze_plan(job, cluster=str(folder / "cluster.toml"))


def test_the_plan_says_how_many_devices_a_slow_store_feeds(
    image_job: tuple[Job, float], tmp_path: Path
) -> None:
    job, sample_bytes = image_job
    answers = analyzed(job, tmp_path)
    feed = analysis_json(answers)["forecast"]["data_feed"]
    assert feed["devices"] == 8
    assert feed["limits"][0]["cause"] == "store bandwidth"
    # One epoch: each of 30 samples leaves the store once.
    assert feed["samples_per_second"] == pytest.approx(1e6 / sample_bytes, rel=0.1)
    assert 0 < feed["share"] < 1
    assert feed["fed_devices"] == pytest.approx(8 * feed["share"])
    bandwidth, latency, decoding = feed["assumed"]
    assert bandwidth == "store bandwidth: 0.001 GB/s per node, given in the cluster file"
    assert latency == "store latency: 20 ms per request, given in the cluster file"
    assert decoding.startswith("decoding: ")
    shortage, *_ = [note for note in plan_notes(job, answers.study.plan_result) if "the data feed" in note]
    assert "store bandwidth supplies" in shortage
    assert note_level(shortage, answers.study.plan_result) == "warning"
    assert note_level("any other note", answers.study.plan_result) == "info"
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render_analysis(answers))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Data feed, forecast" in shown
    assert "of 8 devices fed" in shown


WITHOUT_RATES = '[[nodes]]\ndevice = "H100 SXM"\n'


def origins(job: Job, folder: Path) -> list[str]:
    """The origins of the rates in a plan whose cluster file has none."""
    feed = analysis_json(analyzed(job, folder, WITHOUT_RATES))["forecast"]["data_feed"]
    return list(feed["assumed"])


def test_without_rates_and_probe_those_of_the_store_are_assumed_by_name(
    image_job: tuple[Job, float], tmp_path: Path
) -> None:
    job, _ = image_job
    unprobed = job.model_copy(update={"data": job.data.model_copy(update={"probe_store": False})})
    bandwidth, latency, _ = origins(unprobed, tmp_path)
    assert bandwidth == (
        "store bandwidth: 1.25 GB/s per node, assumed (cluster file: store_gb_per_second; data.probe_store = "
        "false)"
    )
    assert latency.startswith("store latency: 0.10 s per request, assumed")


def test_a_plan_probes_the_store_once_and_later_plans_use_the_record(
    image_job: tuple[Job, float], tmp_path: Path
) -> None:
    job, _ = image_job
    first = origins(job, tmp_path)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    assert f"measured by a probe on {day}" in first[1]
    records = list((tmp_path / "cache" / "rates").glob("store-*.json"))
    assert len(records) == 1
    written = records[0].read_bytes()
    assert origins(job, tmp_path)[1] == first[1]
    assert records[0].read_bytes() == written


def test_the_choice_of_loader_threads_is_part_of_the_plan(
    image_job: tuple[Job, float], tmp_path: Path
) -> None:
    job, _ = image_job
    answers = analyzed(job, tmp_path)
    found = analysis_json(answers)
    assert found["loader_workers"] == found["forecast"]["data_feed"]["workers"] >= 1
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render_analysis(answers))
    assert "(chosen: data.workers = 'auto')" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_rates_of_a_store_survive_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(CLUSTER)
    cluster = read_cluster(str(tmp_path / "a.toml"))
    node = cluster.nodes[0]
    assert (node.store_bytes_per_second, node.store_latency_seconds) == (1e6, 0.02)
    (tmp_path / "b.toml").write_text(export_cluster(cluster))
    assert read_cluster(str(tmp_path / "b.toml")).nodes == cluster.nodes
