"""Outcome of a run, by whether its last state is on disk."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from support.ranks import run_job
from wanma.job.plan.plan import Plan


def test_a_run_whose_last_state_is_not_saved_has_failed_however_soon_that_is_known(tmp_path: Path) -> None:
    """A full disk may refuse so quickly that the failure is told with the last step, before the end."""
    job = {
        "model": {"family": "decoder", "layers": 1, "hidden": 32, "heads": 4},
        "data": {"text": [argparse.__file__], "sequence_length": 32, "cache": str(tmp_path / "cache")},
        "train": {"steps": 2, "global_batch": 2, "validation_samples": 2},
        "checkpoint": {"in_memory_every_steps": "off"},
    }
    with pytest.raises(AssertionError, match="the checkpoint of step 2 was not saved"):
        run_job(tmp_path / "run", job, Plan(micro_batch=2), patch="support.faults:no_room_for_checkpoints")
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "not saved: rank 0: File too large" in events
    assert '"kind": "finish"' not in events
