"""The parity check finds that this torch trains alike in every layout, and would say where it does not."""

from __future__ import annotations

import math
import multiprocessing

import pytest

from wanma.api import parity_check
from wanma.api.parity_check import LAYOUTS, MAX_DEVIATION, check_parity, max_deviation
from wanma.hardware.checks.doctor import CheckResult
from wanma.job.errors import WanmaError

REMEDY = "avoid this layout, or install torch 2.15, the newest tried"


@pytest.mark.slow
def test_every_layout_follows_one_process_and_one_that_cannot_run_is_named(
    capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Every day one layout; tests/parallel has all."""
    before = set(multiprocessing.active_children())
    names = list(LAYOUTS) if request.config.getoption("--full") else ["dp_shard = 2"]
    found = check_parity({**{name: LAYOUTS[name] for name in names}, "tp = 3": {"tp": 3}})
    assert [finding.name for finding in found] == [f"parity: {name}" for name in (*names, "tp = 3")]
    assert [finding.status for finding in found] == [*["ok"] * len(names), "warn"], found
    assert all("losses are those of one process" in finding.text for finding in found[:-1])
    assert found[-1].text.startswith("does not train: ")
    assert "tp" in found[-1].text
    assert found[-1].remedy == REMEDY
    assert set(multiprocessing.active_children()) <= before
    assert capfd.readouterr() == ("", "")


def test_other_losses_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = {"one": [2.0, 1.5, 1.0], "equal": [2.0, 1.5 + 1e-12, 1.0], "wrong": [2.0, 1.53, 1.0]}
    curves |= {"nan": [2.0, math.nan, 1.0], "short": [2.0, 1.5]}
    monkeypatch.setattr(
        parity_check, "_train_losses", lambda _, keys: curves[str(keys["name"]) if keys else "one"]
    )
    assert check_parity({name: {"name": name} for name in ("equal", "wrong", "nan", "short")}) == [
        CheckResult("parity: equal", "ok", "losses are those of one process (largest difference 7e-13)"),
        CheckResult("parity: wrong", "warn", "losses differ from those of one process by 2.0e-02", REMEDY),
        CheckResult("parity: nan", "warn", "losses differ from those of one process by nan", REMEDY),
        CheckResult("parity: short", "warn", "losses differ from those of one process by inf", REMEDY),
    ]
    assert max_deviation([2.0], [2.0 + 4 * MAX_DEVIATION]) == pytest.approx(2 * MAX_DEVIATION)


def test_a_torch_with_which_one_process_fails_stops_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: object, keys: object) -> list[float]:
        raise WanmaError("no such operator")

    monkeypatch.setattr(parity_check, "_train_losses", fail)
    with pytest.raises(WanmaError, match="no such operator"):
        check_parity()
