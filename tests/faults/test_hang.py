"""A rank that sleeps where it reads data: who it is and where it stands is told, beside who waits for it.

Every day in tests/elastic/supervisor/test_supervisor.py, with ranks that do nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.command import Desk
from support.slowness import patient

JOB = f"""\
[model]
factory = "sleepy:model"
[data]
factory = "sleepy:Numbers"
arguments = {{ asleep = 2 }}
[train]
steps = 100
global_batch = 4
[parallel]
dp_replicate = 4
[cluster]
hang_timeout_seconds = {patient(8)}
max_restarts = 0
"""


@pytest.mark.full
def test_a_rank_that_sleeps_in_data_loading_is_named_with_the_line_and_those_who_wait(desk: Desk) -> None:
    (desk.folder / "sleepy.toml").write_text(JOB)
    running = desk.start("train", "sleepy.toml", "--run-dir", "asleep")
    running.until(lambda: desk.training("asleep").steps_begun() >= 1)
    running.look()
    ran = running.end()
    assert (ran.code, running.left()) == (1, [])
    source = (Path(__file__).parent / "sleepy.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "time.sleep" in text)
    first, *others = ran.told_once().partition("no rank reported progress for ")[2].splitlines()
    assert re.fullmatch(
        rf"\d+ s \(cluster.hang_timeout_seconds = {patient(8)}\): "
        rf"rank 2 is in data loading \(sleepy.py:{line}\) while 3 other ranks wait in all_reduce #\d+ .*",
        first,
    ), ran.text
    assert re.match(
        rf"  rank 2 has been in data loading of step \d+ for .*/sleepy.py:{line} in read_slowly\)", others[0]
    )
    assert others[0].endswith("<- outlier")
    assert any(text.startswith("  ranks 0-1, 3 have been in ") for text in others)
    report = (desk.training("asleep").path / "logs" / "hang-report.txt").read_text()
    stack = report.partition("stack of rank 2 ")[2]
    assert re.search(
        r"sleepy.py:\d+ in read_slowly\n.* in __getitem__\n(.*\n)*.*step_loader.py:\d+ in __next__", stack
    )
    assert re.search(r"rank 2: .* collective: none, before that: .*all_reduce #\d+", report)
