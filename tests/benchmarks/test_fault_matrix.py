"""The table of faults and the soak: what they make of what was noted, and where they put it."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from support.fault_table import PROPERTY, Row

pytest_plugins = ["pytester"]


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.recovery.{name}")


def test_a_line_per_fault_and_a_column_per_plan() -> None:
    rows = [
        Row("killed", "2 replicas", "memory", 1, 0.512),
        Row("slow", "2 replicas", "", 0, None),
        Row("killed", "8 nodes", "partner", 0, 2.0, weights="within 1e-6"),
    ]
    assert module("matrix").matrix([vars(row) for row in rows]) == (
        "| fault | 2 replicas | 8 nodes |\n"
        "| --- | --- | --- |\n"
        "| killed | 0.51 s, 1, memory | 2.00 s, 0, partner; within 1e-6 |\n"
        "| slow | no recovery needed |  |\n"
    )


def test_a_fault_that_is_met_again_has_its_newest_row_in_its_old_place() -> None:
    def row(fault: str, seconds: float, plan: str = "2 replicas") -> dict[str, Any]:
        return vars(Row(fault, plan, "memory", 0, seconds))

    kept = [row("killed", 1.0), row("killed", 2.0, "ZeRO-3"), row("stopped", 3.0)]
    found = module("matrix").merged(kept, [row("killed", 9.0), row("new", 4.0)])
    assert found == [row("killed", 9.0), row("killed", 2.0, "ZeRO-3"), row("stopped", 3.0), row("new", 4.0)]


def test_the_rows_are_what_passing_tests_note(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        def test_noted(record_property): record_property({PROPERTY!r}, {{"fault": "killed"}})
        def test_other(record_property): record_property("more", 1)
        def test_failed(record_property): record_property({PROPERTY!r}, {{"fault": "lost"}}); assert False
        def test_skipped(): pytest.skip("not here")
        """
    )
    found = module("matrix").Rows()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[found])
    assert found.rows == [{"fault": "killed"}]
    assert [name.rpartition("::")[2] for name in found.missing] == ["test_failed", "test_skipped"]


def test_a_part_of_the_page_is_replaced_and_nothing_else() -> None:
    replaced = module("page").replaced
    page = "before\n<!-- soak -->\nold\n<!-- /soak -->\nafter <!-- other -->\n"
    assert replaced(page, "new\n", "soak") == (
        "before\n<!-- soak -->\n\nnew\n\n<!-- /soak -->\nafter <!-- other -->\n"
    )
    with pytest.raises(ValueError, match="no <!-- other -->"):
        replaced(page, "new", "other")
    page = replaced(module("page").PAGE.read_text(), "the new part", module("matrix").MARKER)
    assert page.count("\nthe new part\n") == 1


def test_the_same_seed_strikes_alike_and_about_as_often_as_asked() -> None:
    plan = module("soak").plan_faults
    faults = list(itertools.islice(plan(3, 20.0), 200))
    assert faults == list(itertools.islice(plan(3, 20.0), 200))
    assert faults != list(itertools.islice(plan(4, 20.0), 200))
    assert {fault.kind for fault in faults} == set(module("soak").KINDS)
    assert {fault.rank for fault in faults} == {0, 1}
    assert sum(fault.wait_seconds for fault in faults) / 200 == pytest.approx(20, rel=0.1)
    assert all(10 <= fault.wait_seconds <= 30 for fault in faults)


def test_the_time_of_a_recovery_begins_with_the_first_fault_before_it() -> None:
    soak = module("soak")
    kill, stop = "SIGKILL of a rank", "SIGSTOP of a rank"
    faults = [
        soak.InjectedFault(kill, 10.0, 5),
        soak.InjectedFault(stop, 10.5, 5),
        soak.InjectedFault(stop, 30.0, 90),
    ]
    recoveries = [
        {"time": 11.5, "repeated_steps": 2, "source": "memory", "step": 4, "seconds": 1.2},
        {"time": 36.0, "repeated_steps": 1, "source": "checkpoint", "step": 80, "seconds": 0.9},
    ]
    assert soak.costs(faults, recoveries) == [(kill, 1.5, 2), (stop, 6.0, 1)]
    text = soak.summary(faults, recoveries, 100, 120.0, [], "the command")
    assert (
        "2.0 minutes, 100 steps, 3 faults, 2 recoveries (from checkpoint, memory), 3 steps repeated" in text
    )
    assert "| SIGKILL of a rank | 1 | 1.50 (1.50–1.50) | 2 |" in text
    assert "bit-identical weights" in text
    assert "the losses differ" in soak.summary(faults, recoveries, 9, 1.0, ["the losses differ"], "")
    lines = soak.event_log(faults, recoveries).splitlines()[2:]
    assert [line.split(maxsplit=1)[1].split(":")[0] for line in lines][:3] == [
        *("step 5", "step 5", "resumed from memory, step 4; 1.20 s, 2 steps repeated")
    ]


def test_a_run_that_differs_in_anything_is_found_out(tmp_path: Path) -> None:
    soak = module("soak")

    def run(name: str, losses: list[float], digest: str) -> Path:
        folder = tmp_path / name / "run"
        step = folder / "checkpoints" / "step-00000002"
        step.mkdir(parents=True)
        manifest = {"manifest": {"files": {"rank-00000.safetensors": {"sha256": digest}}}}
        (step / "manifest.json").write_text(json.dumps(manifest))
        lines = [json.dumps({"step": number, "loss": loss}) for number, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / name

    whole = run("whole", [2.0, 1.0], "a")
    assert soak.differences(whole, run("same", [2.0, 1.0], "a"), 2) == []
    assert soak.differences(whole, run("loss", [2.0, 1.5], "a"), 2) == ["the losses differ"]
    weights = "the final weights or optimizer state differ"
    assert soak.differences(whole, run("weights", [2.0, 1.0], "b"), 2) == [weights]
    assert len(soak.differences(whole, run("short", [2.0], "a"), 2)) == 2
