"""Data of a step as a run reports it: samples that cannot be read are listed, counted and limited."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wanma.data.batch import BadSample, Batch
from wanma.data.cache import node_cache
from wanma.data.datasets.load_times import STORED_IMAGE_PARTS, LoadTimes
from wanma.data.step_loader import StepBatches
from wanma.data.stores.client import Traffic
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.training.run import step_data as module
from wanma.training.run.step_data import StepData


def step(number: int, *bad: BadSample) -> StepBatches:
    batch = Batch(
        (torch.tensor([[0.0], [float("nan")]]),),
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([2 * number, 2 * number + 1]),
        torch.ones(2, dtype=torch.bool),
    )
    return StepBatches(number, 2, [replace(batch, bad_samples=bad)])


def bad(sample: int, *, is_substituted: bool = False) -> BadSample:
    return BadSample(sample, f"a.tar: row {sample}", "the image is empty", is_substituted)


def data() -> Any:
    return SimpleNamespace(
        load_times=LoadTimes(STORED_IMAGE_PARTS),
        sample_name=lambda number: f"sample {number}",
        bad_file_count=0,
    )


def step_data(
    folder: Path, limit: int = 10, writes: bool = True, node: int = 0, nodes: int = 1, ranks: int = 1
) -> tuple[StepData, list[str]]:
    messages: list[str] = []
    plan = SimpleNamespace(pp=1, cp=1, tp=1, world_size=ranks)
    mesh: Any = SimpleNamespace(contributes_loss=writes, coordinate=lambda _: 0, plan=plan)
    section = DataSection(bad_data="skip", bad_data_limit=limit)
    worker: Any = SimpleNamespace(node_rank=node, local_world_sizes=(1,) * nodes)
    return StepData(
        folder / "bad-samples-0.jsonl", mesh, lambda text, _: messages.append(text), section, worker
    ), messages


def end_step(report: StepData) -> None:
    report.take_exchanged_sums(report.exchanged_terms())


def test_bad_samples_are_listed_and_the_first_one_is_told(tmp_path: Path) -> None:
    report, messages = step_data(tmp_path)
    report.begin(data(), step(0))
    report.begin(data(), step(1, bad(2), bad(3, is_substituted=True)))
    report.begin(data(), step(2, bad(4)))
    end_step(report)
    lines = [json.loads(line) for line in (tmp_path / "bad-samples-0.jsonl").read_text().splitlines()]
    assert [(line["step"], line["sample"], line["place"], line["action"]) for line in lines] == [
        (2, 2, "a.tar: row 2", "skip"),
        (2, 3, "a.tar: row 3", "substitute"),
        (3, 4, "a.tar: row 4", "skip"),
    ]
    assert messages == [
        "data: a.tar: row 2: the image is empty; its position is skipped. "
        "All are listed in bad-samples-0.jsonl"
    ]
    assert report.metrics()["bad_samples"] == 3
    assert report.non_finite_sample_names() == ["sample 5"]


def test_ranks_that_read_the_same_samples_list_them_once(tmp_path: Path) -> None:
    report, _ = step_data(tmp_path, writes=False)
    report.begin(data(), step(0, bad(0)))
    assert list(tmp_path.iterdir()) == []
    end_step(report)
    assert "bad_samples" not in report.metrics()


def test_the_record_counts_the_bad_samples_of_all_ranks(tmp_path: Path) -> None:
    ranks = [step_data(tmp_path, ranks=2)[0] for _ in range(2)]
    counts = []
    for number, found in enumerate(([(), (bad(1),)], [(bad(2), bad(3)), (bad(1),)], [(), ()])):
        for rank, own in zip(ranks, found, strict=True):
            rank.begin(data(), step(number, *own))
        terms = [rank.exchanged_terms() for rank in ranks]
        for rank in ranks:
            rank.take_exchanged_sums([sum(each) for each in zip(*terms, strict=True)])
        counts.append([rank.metrics()["bad_samples"] for rank in ranks])
    assert counts == [[1, 1], [4, 4], [4, 4]]


def test_more_different_samples_than_the_limit_end_the_run(tmp_path: Path) -> None:
    report, _ = step_data(tmp_path, limit=2)
    for number in range(2):  # two epochs
        report.begin(data(), step(number, bad(0), bad(1)))
        end_step(report)
    report.begin(data(), step(2, bad(5)))
    with pytest.raises(JobError, match=r"3 samples .*_limit = 2"):
        end_step(report)


def test_a_sample_that_several_ranks_have_met_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, _ = step_data(tmp_path, limit=2, ranks=2)
    report.begin(data(), step(0, bad(0)))
    joined = [{bad(0).place, bad(1).place}, {bad(number).place for number in range(3)}]
    monkeypatch.setattr(module, "all_gather_objects", lambda *_: [joined.pop(0)])
    for _ in range(2):  # asked once, while no rank meets another one
        report.take_exchanged_sums((0.0, 4.0))
    assert len(joined) == 1
    with pytest.raises(JobError, match=r"3 samples .*_limit = 2"):
        report.take_exchanged_sums((1.0, 5.0))


def test_the_limit_counts_the_samples_of_other_workers_of_parameter_servers(tmp_path: Path) -> None:
    report, _ = step_data(tmp_path, limit=3)
    report.begin(data(), step(0, bad(0), bad(1)))
    for places in ([bad(0).place, bad(1).place], [bad(1).place, bad(2).place]):
        report.take_exchanged_sums((1.0, 2.0), places)
    with pytest.raises(JobError, match=r"4 samples .*_limit = 3"):
        report.take_exchanged_sums((1.0, 2.0), [bad(3).place])


def test_files_left_out_as_a_whole_count_and_no_restart_follows(tmp_path: Path) -> None:
    report, _ = step_data(tmp_path, limit=2)
    with_files = data()
    with_files.bad_file_count = 2
    report.begin(with_files, step(0))
    end_step(report)
    report.begin(with_files, step(1, bad(2)))
    with pytest.raises(JobError, match=r"1 samples and 2 whole files"):
        end_step(report)


def test_seconds_of_loading_are_those_since_the_last_record(tmp_path: Path) -> None:
    report, _ = step_data(tmp_path)
    one = data()
    report.begin(one, step(0))
    with one.load_times.measure("decode"):
        pass
    assert report.metrics()["load_seconds"]["decode"] > 0
    assert report.metrics() == {"load_seconds": {"read": 0.0, "decode": 0.0, "collate": 0.0}}


def set_traffic(monkeypatch: pytest.MonkeyPatch, totals: Traffic) -> None:
    """Let this process have that traffic, whose later changes count, too."""
    monkeypatch.setattr(node_cache, "store_traffic", totals.copy)
    monkeypatch.setattr(node_cache, "_caches", [])


def test_traffic_is_that_since_the_last_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = step_data(tmp_path)
    totals: Traffic = Counter({("store_requests", "s3"): 3, ("store_bytes", "s3"): 10})
    totals.update({("cache_blocks", "hit"): 5, ("cache_blocks", "miss"): 1})
    set_traffic(monkeypatch, totals)
    end_step(report)
    assert report.metrics() == {
        "store_requests": {"s3": 3},
        "store_bytes": {"s3": 10},
        "cache_blocks": {"hit": 5, "miss": 1},
    }
    totals.update({("store_requests", "s3"): 2, ("store_bytes", "s3"): 7, ("store_requests", "https"): 1})
    end_step(report)
    assert report.metrics() == {"store_requests": {"s3": 2, "https": 1}, "store_bytes": {"s3": 7}}


def test_traffic_before_the_ranks_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = step_data(tmp_path)
    set_traffic(monkeypatch, Counter({("store_requests", "s3"): 1, ("store_bytes", "s3"): 10}))
    report.add_traffic(Counter({("store_requests", "s3"): 3, ("store_requests", "https"): 2}))
    end_step(report)
    end_step(report)
    assert report.metrics() == {"store_requests": {"s3": 4, "https": 2}, "store_bytes": {"s3": 10}}


def test_traffic_of_all_ranks_is_added_up_by_store_and_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: Traffic = Counter({("store_requests", "s3"): 3, ("store_bytes", "s3"): 10})
    totals["store_requests", "own"] = 4
    set_traffic(monkeypatch, totals)
    ranks = [step_data(tmp_path, node=node, nodes=3)[0] for node in (0, 2, 2)]
    sums = [sum(terms) for terms in zip(*(rank.exchanged_terms() for rank in ranks), strict=True)]
    for rank in ranks:
        rank.take_exchanged_sums(sums)
        assert rank.metrics() == {
            "store_requests": {"s3": 9, "other": 12},
            "store_bytes": {"s3": 30},
            "node_requests": {"0": 7, "2": 14},
            "node_bytes": {"0": 10, "2": 20},
        }
    (many, _) = step_data(tmp_path, node=64, nodes=65)
    end_step(many)
    assert "node_requests" not in many.metrics()
