"""`wanma doctor`: when layouts are compared."""

from __future__ import annotations

import pytest

from wanma.api import parity_check
from wanma.cli.main import main
from wanma.hardware.checks import doctor
from wanma.hardware.checks.doctor import CheckResult


@pytest.mark.parametrize(
    ("installed", "options", "is_compared"),
    [("2.15.1+cpu", [], False), ("2.16.0+cpu", [], True), ("2.13.0", ["--parity"], True)],
)
def test_layouts_are_compared_with_an_untried_torch_and_on_request(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: str,
    options: list[str],
    is_compared: bool,
) -> None:
    monkeypatch.setattr("wanma.torch_internals.versions.version", lambda _: installed)
    monkeypatch.setattr(doctor, "run_checks", lambda _: [CheckResult("torch", "ok", installed)])
    monkeypatch.setattr(
        parity_check, "check_parity", lambda: [CheckResult("parity: pp = 2", "warn", "differs", "avoid it")]
    )
    assert main(["doctor", *options]) == 0
    shown = capsys.readouterr().out
    assert installed in shown
    assert ("parity: pp = 2" in shown) == ("avoid it" in shown) == is_compared


def test_nothing_is_compared_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda _: [CheckResult("torch", "missing", "no module torch")])
    assert main(["doctor", "--parity"]) == 0
    assert "parity" not in capsys.readouterr().out
