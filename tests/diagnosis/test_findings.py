"""Causes that a diagnosis names, each beside one that looks like it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.diagnosed_run import FORECAST, GIB, HEALTHY, Records
from wanma.diagnosis.evidence import read_evidence
from wanma.diagnosis.finding import Finding
from wanma.diagnosis.presentation import findings_text
from wanma.observe.units import bytes_text
from wanma.report.run_report import read_report


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.urgency != "end"]


def test_a_healthy_run_has_no_finding(records: Records) -> None:
    records.train(HEALTHY)
    assert names(records.diagnose()) == []
    assert "compute" in findings_text(read_evidence(read_report(records.run)), [])


def test_a_rank_without_its_processors_a_slow_device_and_a_slow_link_are_told_apart(tmp_path: Path) -> None:
    parts = {**HEALTHY, "communication": 0.8}
    for number, (cores, cause) in enumerate(
        [((1.0, 0.4), "does not get its processors"), ((0.5, 1.0), "computes more slowly")]
    ):
        records = Records(tmp_path / str(number))
        records.train(parts, ranks=({"cores": cores[0]}, {"cores": cores[1], "compute": 1.6}))
        (straggler,) = [finding for finding in records.diagnose() if finding.urgency == "slow"]
        assert straggler.name == "straggler"
        assert "rank 1" in straggler.title
        assert cause in straggler.title
    slow_link = Records(tmp_path / "link")
    slow_link.train(parts)
    assert names(slow_link.diagnose()) == ["communication"]


@pytest.mark.parametrize(
    ("cores", "foreign", "is_cause"), [(0.3, 3.2, True), (0.3, 1.0, False), (0.6, 2.7, False)]
)
def test_other_programs_are_the_cause_where_ranks_lack_processors_and_none_is_free(
    records: Records, cores: float, foreign: float, is_cause: bool
) -> None:
    parts = {**HEALTHY, "compute": 1.9, "communication": 0.9, "data": 0.4}
    records.train(parts, ranks=({"cores": cores},) * 2, foreign=foreign)
    others = {"computation", "communication", "slow_store"}
    assert set(names(records.diagnose())) == ({"other_programs"} if is_cause else others)


def test_communication_as_forecast_is_no_finding(records: Records) -> None:
    records.train({**HEALTHY, "communication": 0.105})
    assert names(records.diagnose()) == []


def test_stages_of_a_pipeline_are_no_peers(records: Records, tmp_path: Path) -> None:
    work = ({"compute": 0.4}, {"compute": 0.9})
    records.train(HEALTHY, ranks=work, groups=(0, 1))
    assert names(records.diagnose()) == []
    peers = Records(tmp_path / "peers")
    peers.train(HEALTHY, ranks=work)
    assert names(peers.diagnose()) == ["straggler"]


def test_a_rank_that_is_no_longer_a_straggler_or_was_one_before_a_restart_is_none(records: Records) -> None:
    records.train(HEALTHY, ranks=({"compute": 0.4}, {"compute": 0.9}))
    assert names(records.diagnose()) == ["straggler"]
    slow = records.events[-1]
    for later in ({**slow, "is_slow": False}, {"kind": "start", "time": 0.0, "step": 9, "is_restart": True}):
        records.events[2:] = [later]
        assert names(records.diagnose()) == []


def test_a_rank_slower_than_its_peers_but_no_straggler_is_no_slow_link(records: Records) -> None:
    records.train({**HEALTHY, "communication": 0.3}, ranks=({}, {"compute": 1.1}))
    assert names(records.diagnose()) == []


def test_a_node_of_an_earlier_start_is_not_judged(records: Records) -> None:
    records.train(HEALTHY, growth=GIB / 600)
    assert names(records.diagnose()) == ["leak"]
    records.events[0]["time"] = records.usage[-1]["time"] + 100.0
    assert names(records.diagnose()) == []


@pytest.mark.parametrize(
    ("reading", "cause", "change"),
    [
        (
            {"is_throttled": True, "celsius": 93.0},
            "throttled in 100.0 % of the readings, at 93 °C",
            "cooling",
        ),
        ({"clock_hertz": 1.1e9}, "its GPU's clock is 1.10 GHz, that of its peers' 1.80 GHz", "clocks"),
        ({"xid": 79, "is_throttled": True}, "its GPU reports XID 79", "replace the node"),
        ({"ecc_errors": 3}, "memory errors of its GPU that were not corrected: 3", "replace the GPU"),
        ({}, "its device, or the size of its samples", "wanma bench machine"),
    ],
)
def test_the_readings_of_a_stragglers_gpu_say_why(
    records: Records, reading: dict[str, Any], cause: str, change: str
) -> None:
    plan = {"plan": {"device": "cuda"}, "forecast": FORECAST}
    records.run.plan.write_text(json.dumps(plan))
    records.train(HEALTHY, ranks=({"compute": 0.4}, {"compute": 0.9}))
    sound = {"is_throttled": False, "celsius": 60.0, "clock_hertz": 1.8e9, "ecc_errors": 0, "xid": 0}
    for number, record in enumerate(records.usage):
        own = reading if number else {}
        record["gpus"] = [{**sound, "gpu": 4, "rank": 0}, {**sound, **own, "gpu": 2, "rank": 1}]
    (straggler,) = [finding for finding in records.diagnose() if finding.name == "straggler"]
    assert cause in straggler.title
    assert change in straggler.change


def test_rank_0_may_be_the_straggler_itself(records: Records) -> None:
    records.train({**HEALTHY, "compute": 1.7}, ranks=({}, {"compute": 0.85}))
    assert "rank 0" in records.diagnose()[-1].title or names(records.diagnose())[0] == "straggler"


def test_a_rank_that_waits_for_its_data_and_a_store_for_which_all_wait_are_told_apart(
    records: Records, tmp_path: Path
) -> None:
    parts = {"data_parallel": 0.6, "data": 0.14, "compute": 0.05}
    records.train(parts, ranks=({"data": 0.14, "cores": 0.07}, {"data": 0.7, "cores": 0.07}))
    found = records.diagnose()
    assert names(found) == ["slow_store"]
    assert found[-1].lost_share == pytest.approx(0.42 / 0.79, rel=0.01)
    one = Records(tmp_path / "one")
    one.train({**parts, "data": 0.0}, ranks=({"data": 0.001}, {"data": 0.7}))
    (straggler,) = [finding for finding in one.diagnose() if finding.urgency == "slow"]
    assert straggler.title == "all ranks wait for rank 1, which waits for its data"
    assert "disk of that node" in straggler.change


@pytest.mark.parametrize(
    ("disk_wait", "cores", "name", "cause"),
    [
        (0.9, 0.2, "slow_store", "the store of its data"),
        (0.3, 0.2, "slow_store", "the store of its data"),  # the other processors are busy
        (0.08, 0.2, "straggler", "waits for its data"),
        (None, 0.2, "straggler", "waits for its data"),
        (0.02, 1.1, "straggler", "work on its samples"),
        (0.9, 1.1, "straggler", "work on its samples"),  # of another program
    ],
)
def test_a_disk_that_serves_other_ranks_first_slow_samples_and_data_that_come_late_are_told_apart(
    records: Records, disk_wait: float | None, cores: float, name: str, cause: str
) -> None:
    parts = {"compute": 0.02, "communication": 0.48}
    ranks = ({"data": 0.001, "cores": 0.2}, {"data": 0.48, "cores": cores})
    records.train(parts, ranks=ranks, disk_wait=disk_wait)
    (finding,) = [finding for finding in records.diagnose() if finding.urgency == "slow"]
    assert finding.name == name
    assert finding.title.startswith("all ranks wait for rank 1")
    assert cause in finding.title
    assert finding.lost_share == pytest.approx(0.479 / 0.5)


def test_a_disk_for_which_rank_0_waits_is_named_once(records: Records) -> None:
    ranks = ({"data": 0.48, "cores": 0.2}, {"data": 0.001, "cores": 0.2})
    records.train({"compute": 0.02, "data": 0.48}, ranks=ranks, disk_wait=0.9)
    assert names(records.diagnose()) == ["slow_store"]


@pytest.mark.parametrize(
    ("loads", "cores", "name", "key"),
    [
        ({"read": 0.6, "decode": 0.1, "collate": 0.0}, 1.0, "slow_store", "data.cache"),
        ({"read": 0.1, "decode": 0.9, "collate": 0.0}, 1.0, "slow_loading", "raise data.workers"),
        ({"dataset": 0.9, "collate": 0.0}, 1.1, "slow_loading", "set data.worker_processes = true"),
        (None, 0.7, "slow_store", "data.cache"),
        (None, 1.1, "slow_loading", "raise data.workers"),
    ],
)
def test_a_slow_store_and_slow_work_on_samples_are_told_apart(
    records: Records, loads: dict[str, float] | None, cores: float, name: str, key: str
) -> None:
    given = {} if loads is None else {"load_seconds": loads}
    records.train({**HEALTHY, "data": 0.5}, ranks=({"cores": cores}, {"cores": cores}), **given)
    found = records.diagnose()
    assert names(found) == [name]
    assert key in found[-1].change


def test_a_bubble_and_slow_transfers_of_stages_are_told_apart(records: Records, tmp_path: Path) -> None:
    records.train({**HEALTHY, "pipeline": 0.4, "bubble": 0.38})
    assert names(records.diagnose())[0] == "bubble"
    other = Records(tmp_path / "transfers")
    other.train({**HEALTHY, "pipeline": 0.4, "bubble": 0.02})
    assert names(other.diagnose())[0] == "communication"


@pytest.mark.parametrize(
    ("part", "title", "key"),
    [
        ("communication", "gradients between replicas or shards", "all_reduce"),
        ("tensor", "tensor parallelism", "tp"),
        ("context", "context parallelism", "cp"),
        ("expert", "experts", "ep"),
        ("pipeline", "activations between stages", "pp"),
    ],
)
def test_communication_is_named_by_its_mesh_dimension(
    records: Records, part: str, title: str, key: str
) -> None:
    parts = {**HEALTHY, part: 0.5} | ({"bubble": 0.0} if part == "pipeline" else {})
    records.train(parts)
    (finding,) = [finding for finding in records.diagnose() if finding.urgency == "slow"]
    assert finding.title == f"ranks wait for {title}"
    assert finding.lost_share == pytest.approx(0.5 / sum(parts.values()))
    assert key in finding.plan_keys


@pytest.mark.parametrize(("part", "name"), [("checkpoint", "checkpoint"), ("host", "host")])
def test_the_largest_part_is_named(records: Records, part: str, name: str) -> None:
    records.train({**HEALTHY, part: 0.5})
    assert names(records.diagnose()) == [name]


def test_computation_that_is_slow_everywhere_is_no_straggler(records: Records, tmp_path: Path) -> None:
    records.train({**HEALTHY, "compute": 1.6})
    (finding,) = [finding for finding in records.diagnose() if finding.urgency == "slow"]
    assert finding.name == "computation"
    assert finding.evidence == ("1.60 s a step, forecast 0.80 s",)
    assert finding.lost_share == pytest.approx(0.8 / 1.75)
    one = Records(tmp_path / "one")
    one.train({**HEALTHY, "compute": 1.6}, ranks=({"compute": 1.6}, {"compute": 0.85}))
    assert names(one.diagnose()) == ["straggler"]


def test_one_long_pause_is_no_finding(records: Records) -> None:
    pause = {"step_seconds": 61.0, "phases": {"forward_backward": 0.85, "host": 60.0}}
    records.train(HEALTHY, change=lambda step: pause if step == 250 else {})
    assert names(records.diagnose()) == []


def test_saves_count_by_all_steps(records: Records) -> None:
    save = {"step_seconds": 61.0, "phases": {"forward_backward": 0.85, "optimizer": 0.15, "checkpoint": 60.0}}
    records.train(HEALTHY, change=lambda step: save if step == 50 else {})
    assert names(records.diagnose()) == ["checkpoint"]


def test_a_gpu_that_waits_for_kernels_and_a_loop_that_does_something_else_are_told_apart(
    records: Records, tmp_path: Path
) -> None:
    idle = {"compute_seconds": None, "gpu_utilization": 0.4}
    records.train(HEALTHY, change=lambda _: idle)
    assert names(records.diagnose()) == ["small_kernels"]
    other = Records(tmp_path / "loop")
    other.train({**HEALTHY, "host": 0.7}, change=lambda _: {**idle, "gpu_utilization": 0.55})
    assert names(other.diagnose()) == ["host"]


@pytest.mark.parametrize(
    ("plan", "free", "bound"),
    [
        ({"recompute": "full"}, 0.6, 0.85 / 4),
        ({"recompute": "selective", "recompute_share": 0.5}, 0.6, 0.85 * 0.25 / 3.25),
        ({"recompute": "full"}, 0.2, None),
        ({"recompute": "none"}, 0.6, None),
    ],
)
def test_recompute_is_a_cause_while_memory_is_free(
    records: Records, plan: dict[str, Any], free: float, bound: float | None
) -> None:
    records.run.plan.write_text(json.dumps({"plan": plan, "forecast": FORECAST}))
    records.train(HEALTHY)
    for record in records.usage:
        needed = (1 - free) * GIB  # the rest is in the cache of the allocator
        record["gpus"] = [
            {"gpu": 0, "memory_bytes": GIB, "needed_memory_bytes": needed, "total_memory_bytes": GIB}
        ]
    findings = records.diagnose()
    assert names(findings) == (["recompute"] if bound else [])
    shares = [finding.lost_share for finding in findings if finding.name == "recompute"]
    assert shares == pytest.approx([bound] if bound else [])


@pytest.mark.parametrize(("seconds", "expected"), [(0.005, ["small_micro_batch"]), (0.05, [])])
def test_small_micro_batches_are_a_cause_while_they_take_milliseconds(
    records: Records, seconds: float, expected: list[str]
) -> None:
    records.run.job.write_text("[train]\nsteps = 1000\nglobal_batch = 32\n")
    records.run.plan.write_text(json.dumps({"plan": {"micro_batch": 1, "dp_replicate": 2}, "forecast": {}}))
    records.train({"compute": 16 * seconds, "optimizer": seconds})
    for record in records.usage:
        record |= {"memory_bytes": 100 * GIB, "memory_available_bytes": 90 * GIB}
    assert names(records.diagnose()) == expected


def test_a_leak_and_a_large_memory_are_told_apart(records: Records, tmp_path: Path) -> None:
    records.train(HEALTHY, growth=GIB / 600)
    assert names(records.diagnose()) == ["leak"]
    for record in records.usage:
        record["ranks"] = [{**entry, "anonymous_bytes": GIB} for entry in record["ranks"]]
    assert names(records.diagnose()) == [], "mapped files are no leak"
    other = Records(tmp_path / "large")
    other.train(HEALTHY)
    assert names(other.diagnose()) == []
    once = Records(tmp_path / "once")
    once.train(HEALTHY)
    for number, record in enumerate(once.usage):
        grown = GIB if number > len(once.usage) / 2 else 0
        record["ranks"] = [
            {**entry, "memory_bytes": entry["memory_bytes"] + grown} for entry in record["ranks"]
        ]
    assert names(once.diagnose()) == [], "it grew once"
    short = Records(tmp_path / "short")
    short.train(HEALTHY, growth=GIB / 60, steps=50)
    assert names(short.diagnose()) == [], "a minute at least must be watched"


def nan_at(step: int, **values: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"loss": None, "non_finite": {"loss": "nan"}, **values} if number == step else {}


def non_finite(step: int, samples: str = "") -> dict[str, Any]:
    return {"kind": "non_finite", "time": 200.0, "step": step, "ranks": [1], "samples": samples}


def test_nan_of_a_learning_rate_a_layer_a_sample_and_the_loss_are_told_apart(tmp_path: Path) -> None:
    def some_layers(*names: str) -> Callable[[int], dict[str, Any]]:
        return nan_at(
            200,
            layer_grad_norms={"blocks.0": 1.0, "blocks.1": None},
            non_finite={"loss": "nan"} | {f"layer_grad_norms.{name}": "nan" for name in names},
        )

    def rising(step: int) -> dict[str, Any]:
        return nan_at(200)(step) | ({"grad_norm": 2.0 ** (step - 190)} if 190 < step < 200 else {})

    cases: list[tuple[Callable[[int], dict[str, Any]], str, str]] = [
        (rising, "", "learning_rate"),
        (some_layers("blocks.1"), "", "last of these layers"),
        (some_layers("blocks.0", "blocks.1"), "", "operations"),
        (some_layers("blocks.0", "blocks.1"), "sample 7", "samples"),
    ]
    for number, (change, samples, cause) in enumerate(cases):
        records = Records(tmp_path / str(number))
        records.train(HEALTHY, change=change)
        records.events.append(non_finite(200, samples))
        finding = next(finding for finding in records.diagnose() if finding.name == "not_finite")
        assert finding.urgency == "wrong"
        assert cause in finding.change, finding


def test_a_step_that_is_not_finite_is_the_end_of_a_run_that_it_stopped(records: Records) -> None:
    records.train(HEALTHY, change=lambda step: {"grad_norm": 2.0 ** (step - 290)} if step > 290 else {})
    end = {"kind": "finish", "time": 900.0, "outcome": "failed", "text": "step 301: the loss is nan"}
    records.events += [non_finite(301), end]
    first = records.diagnose()[0]
    assert (first.name, first.urgency) == ("not_finite", "end")
    assert "learning_rate" in first.change
    records.events[-2]["samples"] = "sample 7"
    assert "samples" in records.diagnose()[0].change


def test_a_step_that_was_skipped_is_not_the_end_of_a_run_that_failed_later(records: Records) -> None:
    records.train(HEALTHY, change=nan_at(200))
    end = {"kind": "finish", "time": 900.0, "outcome": "failed", "text": "rank 1 died"}
    records.events += [non_finite(200), end]
    assert [(finding.name, finding.urgency) for finding in records.diagnose()] == [
        ("failure", "end"),
        ("not_finite", "wrong"),
    ]


def test_steps_by_which_fp16_finds_its_scale_are_no_finding(records: Records) -> None:
    records.train(
        HEALTHY,
        change=lambda step: {"grad_norm": None, "non_finite": {"grad_norm": "inf"}} if step % 50 == 0 else {},
    )
    assert names(records.diagnose()) == []


def test_a_loss_that_rises_and_one_that_wavers_are_told_apart(records: Records, tmp_path: Path) -> None:
    records.train(
        HEALTHY, change=lambda step: {"loss": 5.0 - step / 50 if step < 150 else 2.0 + (step - 150) / 20}
    )
    assert names(records.diagnose()) == ["learning_rate"]
    other = Records(tmp_path / "wavers")
    other.train(HEALTHY, change=lambda step: {"loss": 5.0 - step / 100 + 0.2 * (step % 7)})
    assert names(other.diagnose()) == []
    flat, noise = Records(tmp_path / "flat"), random.Random(0)
    flat.train(HEALTHY, steps=2000, change=lambda _: {"loss": noise.gauss(2.0, 0.5)})
    assert names(flat.diagnose()) == []
    below_zero = Records(tmp_path / "below zero")
    below_zero.train(HEALTHY, steps=2000, change=lambda _: {"loss": noise.gauss(-2.0, 0.1)})
    assert names(below_zero.diagnose()) == []
    for seed in range(10):
        short, noise = Records(tmp_path / f"short {seed}"), random.Random(seed)
        short.train(HEALTHY, steps=200, change=lambda _, noise=noise: {"loss": noise.gauss(2.0, 0.5)})
        assert names(short.diagnose()) == []
    exploded = Records(tmp_path / "exploded")
    exploded.train(HEALTHY, change=lambda step: {"loss": 1e6 if 100 < step < 130 else 5.0 - step / 100})
    assert names(exploded.diagnose()) == ["learning_rate"]


HANG = "no rank reported progress for 8 s (cluster.hang_timeout_seconds = 8): rank 1 is in train.py:7"


@pytest.mark.parametrize(
    ("free", "title", "change"),
    [
        ((40, 39), "its processes were killed", "`kill -9`"),
        ((40, 2), "the memory of node 0 was running out", "parallel.micro_batch"),
        (
            (40, 21),
            "the memory of node 0 was running out",
            "parallel.micro_batch",
        ),  # it would last no reading longer
        ((2, 60), "its processes were killed", "`kill -9`"),
    ],
)
def test_the_newest_readings_of_memory_tell_why_a_run_ended_without_a_word(
    records: Records, free: tuple[int, int], title: str, change: str
) -> None:
    records.train(HEALTHY)
    for record, available in zip(records.usage[-2:], free, strict=True):
        record |= {"memory_bytes": 100 * GIB, "memory_available_bytes": available * GIB}
    first = records.diagnose()[0]
    assert (first.name, first.urgency) == ("crash", "end")
    assert title in first.title
    assert change in first.change
    assert any(
        f"node 0 had {bytes_text(free[1] * GIB)} of 100 GiB of memory free" in text for text in first.evidence
    )


def test_a_run_that_ended_without_a_word_or_a_reading_asks_for_the_kernels_log(records: Records) -> None:
    records.train(HEALTHY)
    first = records.diagnose()[0]
    assert (first.name, first.evidence) == (
        "crash",
        ("no process of it lives on elsewhere, and no end is recorded",),
    )
    assert "dmesg" in first.change
    records.usage[-1] |= {"memory_bytes": GIB}
    assert records.diagnose()[0] == first, "a record without the free memory says nothing of it"
    records.usage[-1] |= {"memory_bytes": GIB, "memory_available_bytes": GIB, "gpus": [{"gpu": 3, "xid": 48}]}
    assert "GPU 3 of node 0 had reported XID 48" in records.diagnose()[0].evidence


def test_the_end_comes_first(records: Records) -> None:
    records.train({**HEALTHY, "checkpoint": 0.5})
    hang = {"kind": "hang", "time": 800.0, "text": f"{HANG}\n  rank 1 has been in data loading"}
    restart = {"kind": "start", "time": 850.0, "step": 0, "is_restart": True, "host": "elsewhere"}
    end = {"kind": "finish", "time": 900.0, "outcome": "failed", "text": "rank 1 died\n  kernel: OOM"}
    records.events += [hang, restart, end]
    first, second = records.diagnose()
    assert (first.name, second.name) == ("failure", "checkpoint"), "the hang was an earlier one"
    assert "rank 1 died" in first.title
    records.events[-2:] = [{**end, "text": HANG}]
    first = records.diagnose()[0]
    assert first.name == "hang"
    assert first.evidence == ("rank 1 has been in data loading",)
    records.events[-2:] = [{**end, "text": ""}]
    assert records.diagnose()[0].name == "failure"


def test_few_steps_are_too_early_to_judge(records: Records) -> None:
    records.train({**HEALTHY, "host": 5.0}, steps=10)
    assert names(records.diagnose()) == []
    assert "too early" in findings_text(read_evidence(read_report(records.run)), [])
