"""Causes that a diagnosis names, each beside one that looks like it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wanma.diagnosis.evidence import read_evidence
from wanma.diagnosis.findings import Finding, diagnose
from wanma.diagnosis.presentation import findings_text
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report

GIB = 1 << 30
FORECAST = {"step": {"compute": 0.8, "data": 0.1, "optimizer": 0.1, "seconds": 1.0, "uncertainty": 0.1}}


class Records:
    """Records of a run of two ranks on one node, a step a second."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "gpt")
        self.run.create()
        self.run.job.write_text("[train]\nsteps = 1000\n")
        self.run.plan.write_text(json.dumps({"plan": {}, "forecast": FORECAST}))
        self.steps: list[dict[str, Any]] = []
        self.usage: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = [
            {"kind": "start", "time": 0.0, "step": 0, "steps": 1000, "world_size": 2, "host": "elsewhere"}
        ]

    def train(
        self,
        parts: dict[str, float],
        *,
        ranks: tuple[dict[str, float], ...] = ({}, {}),
        steps: int = 300,
        growth: float = 0.0,
        change: Callable[[int], dict[str, Any]] = lambda _: {},
        **values: Any,
    ) -> None:
        """Record steps.

        Args:
            parts: seconds of a step by phase; `compute`, `bubble`, and exposed communication by kind.
            ranks: seconds of each rank a step, `compute` and `data`, and `cores`.
            growth: bytes by which the memory of rank 1 grows a second.
            change: values of a step's record that differ, by its number.
        """
        kinds = {kind: parts[kind] for kind in ("tensor", "pipeline") if kind in parts}
        phases = {name: value for name, value in parts.items() if name not in ("compute", "bubble", *kinds)}
        inside = sum(kinds.values()) + parts.get("compute", 0.0)
        phases |= {"forward_backward": inside}
        total = sum(phases.values())
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "time": step * total,
                "step_seconds": total,
                "loss": 2.0,
                "grad_norm": 1.0,
            }
            record |= {"phases": phases, "compute_seconds": parts.get("compute", 0.0)}
            record |= {"exposed_communication_seconds": kinds, "communication_seconds": kinds}
            record |= {"bubble_seconds": parts["bubble"]} if "bubble" in parts else {}
            self.steps.append({**record, **values, **change(step)})
            entries = [
                {
                    "rank": rank,
                    "is_alive": True,
                    "steps": step,
                    "cpu_seconds": step * total * work.get("cores", 1.0),
                    "memory_bytes": 4 * GIB + rank * growth * step * total,
                    "compute_seconds": step * work.get("compute", parts.get("compute", 0.0)),
                    "data_seconds": step * work.get("data", parts.get("data", 0.0)),
                }
                for rank, work in enumerate(ranks)
            ]
            self.usage.append({"time": step * total, "ranks": entries, "disk_read_bytes": step * 1000})

    def diagnose(self) -> list[Finding]:
        for path, records in (
            (self.run.metrics, self.steps),
            (self.run.events, self.events),
            (self.run.node_usage(0), self.usage),
        ):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return diagnose(read_evidence(read_report(self.run)))


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path)


def names(findings: list[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.urgency != "end"]


HEALTHY = {"compute": 0.85, "communication": 0.03, "data": 0.01, "optimizer": 0.11}


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


def test_communication_as_forecast_is_no_finding(records: Records) -> None:
    records.train({**HEALTHY, "communication": 0.105})
    assert names(records.diagnose()) == []


def test_stages_of_a_pipeline_are_no_peers(records: Records) -> None:
    records.train(HEALTHY, ranks=({"compute": 0.4}, {"compute": 0.9}))
    assert names(records.diagnose()) == ["straggler"]
    for record in records.usage:
        record["ranks"] = [{**entry, "peer_group": entry["rank"]} for entry in record["ranks"]]
    assert names(records.diagnose()) == []


def test_ranks_are_judged_by_the_newest_steps(records: Records) -> None:
    records.train(HEALTHY)
    for record in records.usage[:50]:  # it was slow at first
        record["ranks"][1]["compute_seconds"] -= 100.0
    assert names(records.diagnose()) == []


def test_a_node_of_an_earlier_start_is_not_judged(records: Records) -> None:
    records.train(HEALTHY, ranks=({"compute": 0.4}, {"compute": 0.9}))
    records.events[0]["time"] = records.usage[-1]["time"] + 100.0
    assert names(records.diagnose()) == []


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
    assert names(one.diagnose()) == ["straggler"]


@pytest.mark.parametrize(
    ("loads", "cores", "name"),
    [
        ({"read": 0.6, "decode": 0.1, "collate": 0.0}, 1.0, "slow_store"),
        ({"read": 0.1, "decode": 0.9, "collate": 0.0}, 1.0, "slow_loading"),
        (None, 0.7, "slow_store"),
        (None, 1.1, "slow_loading"),
    ],
)
def test_a_slow_store_and_slow_work_on_samples_are_told_apart(
    records: Records, loads: dict[str, float] | None, cores: float, name: str
) -> None:
    given = {} if loads is None else {"load_seconds": loads}
    records.train({**HEALTHY, "data": 0.5}, ranks=({"cores": cores}, {"cores": cores}), **given)
    assert names(records.diagnose()) == [name]


def test_a_bubble_and_slow_transfers_of_stages_are_told_apart(records: Records, tmp_path: Path) -> None:
    records.train({**HEALTHY, "pipeline": 0.4, "bubble": 0.38})
    assert names(records.diagnose())[0] == "bubble"
    other = Records(tmp_path / "transfers")
    other.train({**HEALTHY, "pipeline": 0.4, "bubble": 0.02})
    assert names(other.diagnose())[0] == "communication"


@pytest.mark.parametrize(
    ("part", "name"), [("checkpoint", "checkpoint"), ("host", "host"), ("tensor", "communication")]
)
def test_the_largest_part_is_named(records: Records, part: str, name: str) -> None:
    records.train({**HEALTHY, part: 0.5})
    assert names(records.diagnose()) == [name]


def test_computation_that_is_slow_everywhere(records: Records) -> None:
    records.train({**HEALTHY, "compute": 1.6})
    assert names(records.diagnose()) == ["computation"]


def test_one_long_pause_is_no_finding(records: Records) -> None:
    pause = {"step_seconds": 61.0, "phases": {"forward_backward": 0.85, "host": 60.0}}
    records.train(HEALTHY, change=lambda step: pause if step == 250 else {})
    assert names(records.diagnose()) == []


def test_saves_count_by_all_steps(records: Records) -> None:
    save = {"step_seconds": 61.0, "phases": {"forward_backward": 0.85, "optimizer": 0.15, "checkpoint": 60.0}}
    records.train(HEALTHY, change=lambda step: save if step == 50 else {})
    assert names(records.diagnose()) == ["checkpoint"]


def test_a_gpu_without_kernels_waits_for_the_host(records: Records) -> None:
    records.train(HEALTHY, change=lambda _: {"compute_seconds": None, "gpu_utilization": 0.4})
    assert names(records.diagnose()) == ["host"]


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


NOT_FINITE = "the loss is nan and the gradient norm nan; non-finite on rank 1"


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
        (some_layers("blocks.0", "blocks.1"), "; sample 7: NaN or infinity in the data", "samples"),
    ]
    for number, (change, data, cause) in enumerate(cases):
        records = Records(tmp_path / str(number))
        records.train(HEALTHY, change=change)
        records.events.append(
            {"kind": "message", "time": 200.0, "text": f"step 200: skipped, {NOT_FINITE}{data}"}
        )
        finding = next(finding for finding in records.diagnose() if finding.name == "not_finite")
        assert finding.urgency == "wrong"
        assert cause in finding.change, finding


def test_a_step_that_is_not_finite_is_the_end_of_a_run_that_it_stopped(records: Records) -> None:
    records.train(HEALTHY, change=lambda step: {"grad_norm": 2.0 ** (step - 290)} if step > 290 else {})
    records.events.append(
        {"kind": "finish", "time": 900.0, "outcome": "failed", "text": f"step 301: {NOT_FINITE}"}
    )
    first = records.diagnose()[0]
    assert (first.name, first.urgency) == ("not_finite", "end")
    assert "learning_rate" in first.change
    records.events[-1]["text"] += "; sample 7: NaN or infinity in the data"
    assert "samples" in records.diagnose()[0].change


def test_steps_by_which_fp16_finds_its_scale_are_no_finding(records: Records) -> None:
    records.train(
        HEALTHY,
        change=lambda step: {"grad_norm": None, "non_finite": {"grad_norm": "inf"}} if step % 50 == 0 else {},
    )
    assert names(records.diagnose()) == ["not_finite"]
    records.run.job.write_text('[train]\nsteps = 1000\nprecision = "fp16"\n')
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
    exploded = Records(tmp_path / "exploded")
    exploded.train(HEALTHY, change=lambda step: {"loss": 1e6 if 100 < step < 130 else 5.0 - step / 100})
    assert names(exploded.diagnose()) == ["learning_rate"]


HANG = "no rank reported progress for 8 s (cluster.hang_timeout_seconds = 8)"


def test_the_end_comes_first(records: Records) -> None:
    records.train({**HEALTHY, "checkpoint": 0.5})
    records.events.append(
        {"kind": "finish", "time": 900.0, "outcome": "failed", "text": "rank 1 died\n  kernel: OOM"}
    )
    (records.run.path / "logs" / "hang-report.txt").write_text(f"{HANG}\n  rank 1 is in train.py:7\n")
    first, second = records.diagnose()
    assert (first.name, second.name) == ("failure", "checkpoint"), "the hang was an earlier one"
    assert "rank 1 died" in first.title
    records.events[-1]["text"] = f"{HANG}\n  rank 1 is in train.py:7"
    assert records.diagnose()[0].name == "hang"
    records.events[-1]["text"] = ""
    assert records.diagnose()[0].name == "failure"


def test_few_steps_are_too_early_to_judge(records: Records) -> None:
    records.train({**HEALTHY, "host": 5.0}, steps=10)
    assert names(records.diagnose()) == []
    assert "too early" in findings_text(read_evidence(read_report(records.run)), [])
