"""A run that fails for good: what memory holds is written, so that the same command loses nothing."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command import Desk, Ran, Training, small_disk
from support.fault_table import Row
from support.injection import Fault, after_exchange, injected, struck
from support.nodes import SHARDED, Machines
from support.recovered import COMMON, STEPS, Met, check_whole, meet

IN_STEP_8: dict[str, Any] = {"step": 8, "phase": "forward and backward"}
NO_CHECKPOINT = "checkpoint.every_steps=1000"
SAVED = "the in-memory checkpoint was flushed to disk: checkpoint of step 7 in "


def in_step_8(what: str, *generations: int) -> list[Fault]:
    """Once in each of these generations, of which the first leaves copies of step 7 on both ranks."""
    first, *others = (Fault(what, 1, **IN_STEP_8, generation=number) for number in generations)
    return [*after_exchange(first, 2), *others]


def in_rescue(what: str, times: int = 1, rank: int = 1) -> list[Fault]:
    """Half way through the file of a rank's copy, at so many attempts."""
    return [Fault(what, rank, phase="rescue") for _ in range(times)]


def again(desk: Desk, name: str, *overrides: str) -> Ran:
    return desk.run("train", *COMMON, *overrides, "--run-dir", name)


def check_step_7_is_kept(desk: Desk, met: Met, whole: Training) -> None:
    """Failed with one message, the copy of step 7 saved and its steps on record; the same command goes on."""
    training = met.training
    assert met.ran.code == 1
    assert met.ran.text.count("error: ") == 1, met.ran.text
    assert f"{SAVED}{training.path}/checkpoints/step-00000007" in met.ran.text
    assert training.checkpoints() == ["step-00000007"]
    assert [step["step"] for step in training.metrics] == list(range(1, 8))
    assert training.events[-1]["outcome"] == "failed"
    ran = again(desk, training.path.name, NO_CHECKPOINT)
    assert f"resuming from step 7 of {STEPS}" in ran.out
    check_whole(ran, training, whole)


@pytest.mark.full
def test_an_error_on_every_try_before_the_first_checkpoint_costs_no_step(
    desk: Desk, whole: Training, note: Callable[[Row], None]
) -> None:
    faults = in_step_8("raise", 1, 2)
    met = meet(desk, "mistake", *faults, overrides=(NO_CHECKPOINT,))
    assert "occurred twice after step 7" in met.ran.text
    check_step_7_is_kept(desk, met, whole)
    note(Row("exception in every attempt, before the first checkpoint", "2 replicas", "checkpoint", 0, None))


@pytest.mark.parametrize(
    "flush",
    [
        pytest.param([], id="", marks=pytest.mark.full),
        pytest.param(in_rescue("kill"), id="the flush process killed, too", marks=pytest.mark.full),
    ],
)
def test_kills_on_every_try_cost_no_step_though_the_last_try_began_anew(
    desk: Desk, whole: Training, note: Callable[[Row], None], flush: list[Fault]
) -> None:
    faults = [*in_step_8("kill", 1, 2), Fault("kill", 1, 3, "forward and backward", generation=3), *flush]
    met = meet(desk, "kills", *faults, overrides=(NO_CHECKPOINT, "cluster.max_restarts=2"))
    assert "step 7 (cluster.max_restarts = 2)" in met.ran.text
    assert met.recoveries[-1]["source"] == "beginning"
    check_step_7_is_kept(desk, met, whole)
    if not flush:
        note(
            Row("SIGKILL in every attempt, before the first checkpoint", "2 replicas", "checkpoint", 0, None)
        )


@pytest.mark.full
@pytest.mark.root
def test_a_disk_that_is_full_at_the_end_costs_no_step(
    desk: Desk, whole: Training, note: Callable[[Row], None], tmp_path: Path
) -> None:
    """The last state goes where there is room, is taken up from there, and moves home when it can."""
    training = desk.training("full")
    training.path.mkdir()
    with small_disk(training.path / "checkpoints", "100k") as disk:
        rescued = desk.folder / "state" / "wanma" / "rescued"
        desk._environment["TMPDIR"] = str(tmp_path)
        ran = again(desk, "full", NO_CHECKPOINT)
        assert ran.code == 1
        assert ran.text.count("error: rank ") == ran.text.count("error: ") == 1, ran.text
        assert "checkpoint of step 12 was not saved: " in ran.text
        assert "occurred twice after step 12" in ran.text
        assert f"checkpoint of step {STEPS} in {rescued}" in ran.text
        assert list(disk.iterdir()) == [], "nothing half is left behind"
        assert [path.name for path in tmp_path.iterdir()] == ["desk"], "nor an empty cache of the compiler's"
        assert [path.parent.parent for path in rescued.glob("*/step-*")] == [rescued]

        shown = desk.run("sample", "full", "--runs", ".", "--prompt", "def ", "--tokens", "1")
        shown.check()
        still_full = again(desk, "full", NO_CHECKPOINT)
        assert still_full.code == 0, "there is nothing left to do"
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        home = again(desk, "full", NO_CHECKPOINT)
        assert "step-00000012, flushed to the fallback" in home.out
        check_whole(home, training, whole)
        assert list(rescued.glob("*")) == []
        assert training.checkpoints() == ["step-00000012"]
    note(Row("disk full at the final checkpoint, in every attempt", "2 replicas", "checkpoint", 0, None))


@pytest.mark.full
@pytest.mark.root
def test_a_full_disk_and_kills_cost_no_step(desk: Desk, whole: Training, tmp_path: Path) -> None:
    folder = desk.training("both").path
    folder.mkdir()
    with small_disk(folder / "checkpoints", "100k") as disk:
        faults = in_step_8("kill", 1, 2)
        met = meet(desk, "both", *faults, overrides=("cluster.max_restarts=1",))
        # Where the kills come before the save of step 5 has failed, nothing is told of it.
        assert SAVED in met.ran.text
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        ran = again(desk, "both")
        assert f"resuming from step 7 of {STEPS}" in ran.out
        check_whole(ran, met.training, whole)


@pytest.mark.full
def test_the_process_that_writes_the_last_copy_may_be_killed_half_way(
    desk: Desk, whole: Training, note: Callable[[Row], None]
) -> None:
    faults = [*in_step_8("raise", 1, 2), *in_rescue("kill")]
    met = meet(desk, "writer", *faults, overrides=(NO_CHECKPOINT,))
    check_step_7_is_kept(desk, met, whole)
    note(Row("SIGKILL of the flush process during its write", "2 replicas", "checkpoint", 0, None))


@pytest.mark.exhaustive
def test_where_it_is_killed_again_the_newest_checkpoint_counts(
    desk: Desk, whole: Training, note: Callable[[Row], None]
) -> None:
    met = meet(desk, "killer", *in_step_8("raise", 1, 2), *in_rescue("kill", 2))
    assert met.ran.code == 1
    told = (
        "the in-memory checkpoint of step 7 could not be flushed to disk: "
        "the flush process was killed by SIGKILL"
    )
    assert met.ran.text.count(told) == 1, met.ran.text
    assert met.training.checkpoints() == ["step-00000005"], "no half one is left"
    check_step_5_counts(desk, met, whole)
    note(Row("SIGKILL of the flush process during its write, twice", "2 replicas", "checkpoint", 2, None))


@pytest.mark.exhaustive
def test_the_supervisor_may_be_killed_while_the_run_gives_up(
    desk: Desk, whole: Training, note: Callable[[Row], None]
) -> None:
    """Its copies go with it; nothing that was written does, and the half one is no checkpoint."""
    met = meet(desk, "supervisor", *in_step_8("raise", 1, 2), *in_rescue("kill supervisor"))
    assert met.ran.code == -signal.SIGKILL
    check_step_5_counts(desk, met, whole)
    note(Row("SIGKILL of the supervisor during the final flush", "2 replicas", "checkpoint", 2, None))


def check_step_5_counts(desk: Desk, met: Met, whole: Training) -> None:
    ran = again(desk, met.training.path.name)
    assert f"resuming from step 5 of {STEPS}" in ran.out
    assert met.training.checkpoints() == ["step-00000005", "step-00000010", "step-00000012"]
    check_whole(ran, met.training, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("node", [0, 1])
def test_one_of_two_supervisors_may_be_killed_while_the_run_gives_up(
    desk: Desk, untroubled: Training, note: Callable[[Row], None], node: int
) -> None:
    """Its partner has its copies. The one that holds the meeting place (node 0) may come back at once."""
    faults = [*in_step_8("raise", 1, 2), *in_rescue("kill supervisor", rank=node)]
    marks = desk.folder / "marks-two"
    both = Machines(desk, "two", *SHARDED, NO_CHECKPOINT, **injected(marks, *faults))
    both.start(0)
    both.start(1)
    assert both.running.pop(node).end().code == -signal.SIGKILL
    assert len(struck(marks)) == len(faults)
    if node == 1:
        [left] = both.end()
        assert left.code == 1
        assert SAVED in left.text
        assert both.training.checkpoints() == ["step-00000007"]
        both.running.clear()
        both.start(0)
    both.start(node)
    ended = both.end()
    assert [one.code for one in ended] == [0, 0], ended[0].text + ended[1].text
    check_whole(ended[0], both.training, untroubled)
    who = "the coordinator's supervisor" if node == 0 else "the other supervisor"
    restored = "partner" if node == 0 else "checkpoint"
    note(Row(f"SIGKILL of {who} during the final flush", "ZeRO-3 on 2 nodes", restored, 0, None))


@pytest.mark.full
@pytest.mark.root
def test_full_disks_on_two_machines_at_once_cost_no_step(
    desk: Desk, untroubled: Training, note: Callable[[Row], None], tmp_path: Path
) -> None:
    """Each machine keeps its part; together they are the checkpoint, once there is room."""
    both = Machines(desk, "disks", *SHARDED, NO_CHECKPOINT, WANMA_SECRET="s" * 32)
    states = [tmp_path / f"state-{node}" for node in (0, 1)]

    def run() -> list[Ran]:
        for node, state in enumerate(states):
            both.start(node, ("env", f"XDG_STATE_HOME={state}"))
        return both.end()

    both.training.path.mkdir()
    with small_disk(both.training.path / "checkpoints", "60k") as disk:
        ended = run()
        assert [one.code for one in ended] == [1, 1]
        assert "flushed to disk: in one part per node" in ended[0].text, ended[0].text
        assert "the same command on the same nodes" in ended[0].text
        assert [len(list(state.glob(f"wanma/rescued/*/part-step-{STEPS:08d}-*"))) for state in states] == [
            1,
            1,
        ]
        assert list(disk.iterdir()) == [], "nothing half is left behind"

        still_full = run()
        assert [one.code for one in still_full] == [1, 1]
        assert "the parts cannot be merged: " in still_full[0].text, still_full[0].text
        assert "free space on " in still_full[0].text
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        ended = run()
        assert " are merged into " in ended[0].out
        check_whole(ended[0], both.training, untroubled)
        assert both.training.checkpoints() == [f"step-{STEPS:08d}"]
        assert [list(state.glob("wanma/rescued/*")) for state in states] == [[], []]
    note(Row("disk full on two nodes at the final checkpoint", "ZeRO-3 on 2 nodes", "checkpoint", 0, None))
