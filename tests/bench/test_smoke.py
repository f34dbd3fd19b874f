"""Suites in small: each has an outcome of its own."""

from __future__ import annotations

from pathlib import Path

from wanma.bench.smoke import run_smoke


def test_a_suite_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.toml", tmp_path / "right.toml"
    wrong.write_text("[rule]\nround = 2\n")
    right.write_text('[[contenders]]\nname = "one"\ncommand = ["true"]\n')
    failed, works = run_smoke([str(wrong), str(right)], tmp_path / "results", lambda _: None)
    assert "rule.round: unknown key" in failed.problem
    assert (works.problem, works.skipped) == ("", "")
