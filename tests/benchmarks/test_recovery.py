"""The benchmark of recoveries: what it counts as repeated and as new, whom it kills, what its tables say."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from wanma.job.file.loading import load_job

ROOT = Path(__file__).resolve().parents[2]


def module(name):
    return importlib.import_module(f"benchmarks.recovery.{name}")


def settings(monkeypatch, *arguments):
    run = module("run")
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return list(run.settings(run.parse()))


def lines(*steps, **more):
    return [{"step": step, "time": time, **more} for step, time in steps]


STEADY = [(step, step * 0.5) for step in range(1, 21)]
"""Twenty steps of half a second: the last ends at 10.0."""


# ---------------------------------------------------------------- what a death costs


def test_a_step_that_is_repeated_is_not_a_new_one():
    again = [(17, 12.0), (18, 12.5), (19, 13.0), (20, 13.5), (21, 14.0), (22, 14.5)]
    assert module("watch").cost(lines(*STEADY, *again), killed=10.25, resumed=11.5) == {
        "new_step_seconds": 3.75,
        "first_step_seconds": 1.75,
        "repeated_steps": 4,
        "step_seconds": 0.5,
    }


def test_where_nothing_is_repeated_the_first_step_is_the_new_one():
    found = module("watch").cost(lines(*STEADY, (21, 11.0)), killed=10.25, resumed=10.5)
    assert found["new_step_seconds"] == found["first_step_seconds"] == 0.75
    assert found["repeated_steps"] == 0


def test_a_step_that_the_others_finish_without_noticing_counts_as_finished_before():
    found = module("watch").cost(lines(*STEADY, (21, 10.5), (21, 12.0), (22, 12.5)), 10.25, resumed=11.0)
    assert (found["repeated_steps"], found["new_step_seconds"]) == (1, 2.25)


def test_a_step_that_is_thrown_away_is_none():
    thrown = [{"step": 20, "time": 10.75, "committed": False}]
    found = module("watch").cost(lines(*STEADY) + thrown + lines((21, 11.25)), killed=10.25, resumed=10.75)
    assert (found["first_step_seconds"], found["repeated_steps"]) == (1.0, 0)


def test_a_run_that_only_repeats_says_nothing():
    common = importlib.import_module("benchmarks.common")
    with pytest.raises(common.BenchmarkError, match="no step after step 20"):
        module("watch").cost(lines(*STEADY, (19, 12.0), (20, 12.5)), killed=10.25, resumed=11.0)


def test_a_run_that_leaves_steps_out_says_nothing():
    common = importlib.import_module("benchmarks.common")
    with pytest.raises(common.BenchmarkError, match="goes on with step 24, not 21"):
        module("watch").cost(lines(*STEADY, (24, 12.0), (25, 12.5)), killed=10.25, resumed=11.0)


# ---------------------------------------------------------------- whom it kills, and what it sees


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_the_process_is_killed_after_its_step_and_dropped_steps_are_remembered(tmp_path, sleeper):
    progress = tmp_path / "metrics.jsonl"
    watch = module("watch").Watch(progress, kill_after=9, victim=lambda: sleeper.pid)
    watch.start()
    written = []
    for step in range(1, 10):
        assert sleeper.poll() is None, "killed before step 9"
        written.append({"step": step, "time": time.time()})
        with progress.open("a") as file:
            file.write(json.dumps(written[-1]) + "\n")
        time.sleep(0.03)
    assert sleeper.wait(60) == -signal.SIGKILL
    kept = [*written[:8], {"step": 9, "time": time.time()}]
    progress.write_text("".join(json.dumps(line) + "\n" for line in kept) + '{"step": 10, "ti')
    seen = watch.finish()
    assert seen == [*written, kept[-1]]
    assert written[8]["time"] <= watch.killed


def test_a_run_in_which_nobody_was_killed_is_an_error(tmp_path):
    common = importlib.import_module("benchmarks.common")
    watch = module("watch").Watch(tmp_path / "metrics.jsonl", kill_after=9, victim=os.getpid)
    watch.start()
    with pytest.raises(common.BenchmarkError, match="nobody was killed"):
        watch.finish()


def test_processor_time_is_that_between_two_steps(tmp_path):
    progress = tmp_path / "metrics.jsonl"
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle_program = "import time; print(flush=True); time.sleep(600)"
    idle = subprocess.Popen([sys.executable, "-c", idle_program], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120

    def look():
        times = psutil.Process(busy.pid).cpu_times()
        return time.monotonic(), times.user + times.system

    def until(condition):
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        idle.stdout.readline()  # its start is over
        watched = {"busy": busy.pid, "idle": idle.pid}
        watch = module("watch").ProcessorTime(progress, first=2, last=6, processes=lambda: watched)
        watch.start()
        looks = []
        for taken, step in ((1, 2), (2, 6)):
            looks.append(look())
            with progress.open("a") as file:
                file.write(json.dumps({"step": step, "time": time.time()}) + "\n")
            until(lambda taken=taken: len(watch._taken) == taken)
            looks.append(look())
            until(lambda first=looks[1]: look()[1] > first[1] + 0.3)
        found = watch.finish()
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
        idle.stdout.close()
    assert found["idle"] < 0.01
    # Its own looks are between the first two and between the last two of these.
    seconds, used = zip(*looks, strict=True)
    assert (used[2] - used[1]) / (seconds[3] - seconds[0]) <= found["busy"]
    assert found["busy"] <= (used[3] - used[0]) / (seconds[2] - seconds[1])


def test_processor_time_of_a_run_that_is_too_short_is_an_error(tmp_path):
    common = importlib.import_module("benchmarks.common")
    watch = module("watch").ProcessorTime(tmp_path / "none", 2, 6, processes=dict)
    watch.start()
    with pytest.raises(common.BenchmarkError, match="it ended too early"):
        watch.finish()


def test_the_rank_is_that_of_the_first_start(tmp_path):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    start = "--- 2026-01-01 00:00:00 rank 1 of 2 on node 0 (host), generation {}, process {}, forked ---\n"
    (logs / "rank-1.log").write_text(start.format(1, 123) + "a line\n" + start.format(2, 456))
    assert module("contenders").WanmaRun(tmp_path).process(1) == 123


def test_the_interval_that_counts_is_the_last_that_was_chosen():
    texts = [
        "in-memory checkpoint every 7 steps: 3 ms each, step 80 ms, overhead 0.9%",
        "something else",
        "in-memory checkpoint every step: 0.1 ms each, step 80 ms, overhead 0.1%",
    ]
    interval = module("contenders").interval
    assert interval([{"text": text} for text in texts]) == 1
    assert interval([{"text": text} for text in texts[:2]]) == 7
    assert interval([{"text": "something else"}]) is None


def test_a_copy_costs_what_its_step_takes_beyond_its_neighbours():
    seconds = [1.0, 1.0, 1.5, 1.4, 2.0, 2.2, 2.0]
    with_copy = [2, 4, 5]
    steps = [
        {"step_seconds": taken, "phases": {"checkpoint": 0.02 if number in with_copy else 3e-5}}
        for number, taken in enumerate(seconds)
    ]
    copies = module("contenders").copies
    assert copies(steps) == [0.25]  # 1.5 beside 1.2; beside each other, 4 and 5 say nothing
    assert copies(steps[:5]) == [0.25]  # nor does one at an end
    assert copies([]) == []


def test_what_torchft_gave_up_is_counted(tmp_path, monkeypatch):
    (setting,) = settings(monkeypatch, "--part", "torchft", "--ranks", "2", "--batch", "8")
    whole, alone = {"committed": True, "participants": 2}, {"committed": True, "participants": 1}
    record = [
        *lines((1, 1.0), (2, 2.0), generation=0, **whole),
        *lines((2, 3.0), generation=0, committed=False, participants=2),
        *lines((3, 4.0), (4, 5.0), (5, 6.0), generation=0, **alone),
        *lines((6, 7.0), generation=0, **whole),
    ]
    run = module("contenders").PeerRun(tmp_path)
    assert run.resumed(record, killed=2.5, ranks=2) == 3.0
    assert run.facts(record, 2.5, setting) == {
        "discarded_steps": 1,
        "lost_samples": 12,
        "whole_again_seconds": 4.5,
    }


# ---------------------------------------------------------------- the task


def test_every_part_has_a_job_that_wanma_reads_and_the_same_task_for_the_peers(monkeypatch, tmp_path):
    pieces = settings(monkeypatch)
    assert [(piece.part, piece.ranks) for piece in pieces] == [
        *(("torchrun", 2), ("torchft", 2), ("in-memory", 2), ("supervisor", 2)),
        *(("torchrun", 4), ("torchft", 4)),
    ]
    for piece in pieces:
        path = tmp_path / "job.toml"
        path.write_text(piece.job("corpus.txt", "cache"))
        job = load_job(path)
        assert job.parallel.micro_batch * job.parallel.dp_replicate == job.train.global_batch == 8
        assert piece.task()["model"] == job.model.arguments
        assert piece.task()["steps"] == job.train.steps


def test_torchrun_has_its_best_settings_and_wanmas_threads(monkeypatch):
    contenders = module("contenders")
    (setting,) = settings(monkeypatch, "--part", "torchrun", "--ranks", "4")
    command = contenders.command(setting, contenders.PARTS["torchrun"]["torchrun-10"])
    assert {"--nproc-per-node=4", "--monitor-interval=0.1", "--every=10"} <= set(command.arguments)
    assert command.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert command.environment["OMP_NUM_THREADS"] == str(max(contenders.usable_cores() // 4, 1))


def test_a_batch_that_ranks_cannot_share_is_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        settings(monkeypatch, "--ranks", "4", "--batch", "6")
    assert "multiple" in capsys.readouterr().err


def test_the_peers_know_nothing_of_wanma():
    for script in (ROOT / "benchmarks" / "recovery" / "peers").glob("*.py"):
        assert "import wanma" not in script.read_text()
        assert "from wanma" not in script.read_text()


# ---------------------------------------------------------------- a checkpoint of the peer's


def test_the_peer_carries_on_bit_for_bit_from_its_checkpoint(tmp_path):
    import torch

    peer, common = module("peers.train_ddp"), module("peers.common")
    import numpy as np

    tokens = np.random.default_rng(0).integers(0, 256, size=(4, 1, 2, 17))
    np.save(tmp_path / "tokens.npy", tokens)
    model = {"sequence": 16, "hidden": 16, "heads": 2, "layers": 1}
    stated = {"steps": 4, "model": model, "learning_rate": 0.01, "gradient_clip": 1.0}
    (tmp_path / "task.json").write_text(json.dumps(stated))
    task = common.Task(tmp_path / "task.json")

    def train(module, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            task.loss(module, step, 0).backward()
            task.clip(module)
            optimizer.step()

    one = task.model()
    optimizer = task.adamw(one)
    train(one, optimizer, range(2))
    saver = peer.Saver(tmp_path / "newest.pt")
    saver.save(2, one, optimizer)
    train(one, optimizer, range(2, 4))  # the copy is of step 2, whatever happens meanwhile
    saver.wait()

    other = task.model()
    again = task.adamw(other)
    assert peer.restore(tmp_path / "newest.pt", other, again) == 2
    train(other, again, range(2, 4))
    assert common.digest(other.parameters()) == common.digest(one.parameters())
    assert peer.restore(tmp_path / "none.pt", other, again) == 0
    torch.serialization.set_crc32_options(True)


# ---------------------------------------------------------------- the report


def piece(setting, samples, rounds=3):
    pair = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc"}
    return {
        "settings": asdict(setting),
        "environment": {"machine": "a machine", "versions": {"torch": "2"}},
        "commands": {"wanma-1": "wanma train job.toml"},
        "job": "[model]\n",
        "pairs": [
            {**pair, **{name: {"disturbed": False, **sample} for name, sample in samples.items()}}
            for _ in range(rounds)
        ],
    }


def killed(seconds, repeated, same=True, **more):
    return {
        "new_step_seconds": seconds,
        "first_step_seconds": seconds - 0.1 * repeated,
        "repeated_steps": repeated,
        "step_seconds": 0.1,
        "same_weights": same,
        **more,
    }


def test_the_report_says_what_each_contender_lost(monkeypatch):
    torchrun, torchft, in_memory, supervisor = settings(monkeypatch, "--ranks", "2")
    costs = {
        "wanma-1": killed(0.5, 0),
        "torchrun-1": killed(2.0, 1),
        "wanma-auto": killed(0.8, 3),
        "torchrun-10": killed(2.5, 5),
        "wanma-off": killed(1.0, 5),
    }
    lost = {
        "discarded_steps": 1,
        "lost_samples": 80,
        "whole_again_seconds": 3.0,
        "final_loss": 1.5,
        "final_loss_untroubled": 1.25,
    }
    steps = dict.fromkeys(("off", "1", "2", "5", "10", "auto"), 0.1)
    copied = {
        name: {"step_seconds": seconds, "every": 12, "copies": [0.06, 0.12, 0.24], "same_weights": True}
        for name, seconds in steps.items()
    } | {"1": {"step_seconds": 0.11, "every": None, "copies": [], "same_weights": True}}
    text = module("report").report(
        [
            piece(in_memory, copied),
            piece(torchft, {"wanma-1": killed(0.5, 0), "torchft": killed(1.0, 0, same=False, **lost)}),
            piece(torchrun, costs),
            piece(
                supervisor,
                {
                    "wanma-auto": {
                        "step_seconds": 0.1,
                        "processor": {"supervisor": 0.003, "fork server": 0.0005},
                    }
                },
            ),
        ]
    )
    assert (
        "| wanma, an in-memory checkpoint every step | 0.50 (0.50–0.50) | 0.50 | 0 |  | yes | 100 |" in text
    )
    assert (
        "checkpoint on disk every step | 2.00 (2.00–2.00) | 1.90 | 1 | 0.25 (0.25–0.25) | yes | 100 |" in text
    )
    assert "| torchft | 1.00 (1.00–1.00) | 1.00 | 0 | 0.50 (0.50–0.50) | no | 100 |" in text
    assert "and continued without 80 samples" in text
    assert "step 1.500000, without a kill 1.250000" in text
    assert "| none in memory | 100.0 |  |  |  | yes |" in text
    assert "| 1 | 110.0 | – | – | +10.0% (+10.0% to +10.0%) | yes |" in text
    assert "| 2 | 100.0 | +12.0% (+6.0% to +24.0%) | +6.00% (+3.00% to +12.00%) | +0.0%" in text
    assert "| auto: 12 | 100.0 | +12.0% (+6.0% to +24.0%) | +1.00% (+0.50% to +2.00%) | +0.0%" in text
    assert text.index("is killed, beside torchft") < text.index("Cost of in-memory checkpoints")
    assert "| supervisor | 0.30% (0.30% to 0.30%) |" in text
    assert "| both | 0.35% (0.35% to 0.35%) |" in text


def test_a_range_is_told_where_rounds_differ(monkeypatch):
    torchft = settings(monkeypatch, "--ranks", "2", "--part", "torchft")[0]
    found = piece(torchft, {"wanma-1": killed(0.5, 0), "torchft": killed(1.0, 0)})
    found["pairs"][2]["wanma-1"] = {"disturbed": False, **killed(0.5, 1, same=False)}
    found["pairs"][0]["torchft"]["disturbed"] = True
    for taken in found["pairs"]:
        taken["torchft"] |= {"discarded_steps": 1, "lost_samples": 4, "whole_again_seconds": None}
        taken["torchft"] |= {"final_loss": 1.0, "final_loss_untroubled": 1.0}
    text = module("report").report([found])
    assert "| 0.5 (0–1) |" in text
    assert "| in 1 of 2 |" in text
    assert "2 rounds (1 disturbed)" in text
    assert "before the end in no run" in text
