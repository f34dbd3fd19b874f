"""Shared parts of the benchmarks: statistics, repetition of disturbed samples, CPU time."""

import importlib
import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.common")
    monkeypatch.setattr(module, "product_seconds", lambda: 1.0)
    return module


def quiet(value):
    return {"value": value, "foreign_cpu": 0.0}


@pytest.mark.parametrize("benchmark", ["parallel", "recovery", "startup"])
def test_the_options_of_a_comparison_lead_to_its_report_or_to_an_error_in_words(
    common, benchmark, tmp_path, monkeypatch, capsys
):
    run = importlib.import_module(f"benchmarks.{benchmark}.run")
    results = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--report", "--results", str(results), "--ranks", "2"])
    run.main()
    assert "othing has been measured yet" in capsys.readouterr().out

    def fail(_options):
        raise common.BenchmarkError("wait for a quiet machine")

    options = run.parse()
    options.report, options.setup = False, False
    monkeypatch.setattr(common, "ensure_peers", lambda _options: None)
    with pytest.raises(SystemExit, match="error: wait for a quiet machine"):
        common.carry_out(options, fail, run.report)


def test_a_disturbed_sample_is_repeated_until_it_is_quiet(common):
    foreign = iter([0.8, 0.5, 0.01])
    sample = common.take_sample(lambda: {"foreign_cpu": next(foreign)}, common.Noise(limit=0.1, retries=2))
    assert sample == {"foreign_cpu": 0.01, "disturbed": False, "repeated": 2}


def test_a_sample_that_never_was_quiet_is_flagged(common):
    sample = common.take_sample(lambda: {"foreign_cpu": 0.8}, common.Noise(limit=0.1, retries=1))
    assert sample == {"foreign_cpu": 0.8, "disturbed": True, "repeated": 1}


def test_contenders_alternate_and_a_second_run_adds_only_what_is_missing(common):
    order, saved = [], []

    def contender(name):
        def measure():
            order.append(name)
            return quiet(len(order))

        return measure

    piece = {}
    contenders = {"wanma": contender("wanma"), "peer": contender("peer")}
    for pairs in (2, 3):
        assert common.take_pairs(
            piece,
            contenders,
            pairs=pairs,
            noise=common.Noise(0.1, 0),
            deadline=float("inf"),
            save=lambda: saved.append(len(piece["pairs"])),
        )
    # Every other round has them the other way round.
    assert order == ["wanma", "peer", "peer", "wanma", "wanma", "peer"]
    assert saved == [1, 2, 3]


def test_no_round_starts_after_the_deadline(common):
    piece = {}
    complete = common.take_pairs(
        piece, {}, pairs=1, noise=common.Noise(0.1, 0), deadline=0.0, save=lambda: None
    )
    assert not complete
    assert piece["pairs"] == []


def test_disturbed_rounds_are_kept_but_not_counted(common):
    foreign = (0.9 if number == 1 else 0.0 for number in count())
    piece = {}
    common.take_pairs(
        piece,
        {"wanma": lambda: {"foreign_cpu": next(foreign)}, "peer": lambda: quiet(1)},
        pairs=2,
        noise=common.Noise(0.1, 0),
        deadline=float("inf"),
        save=lambda: None,
    )
    assert [taken["wanma"]["disturbed"] for taken in piece["pairs"]] == [False, True, False]
    assert len(common.undisturbed(piece)) == 2


def test_a_machine_that_never_is_quiet_ends_the_measurement_with_advice(common):
    with pytest.raises(common.BenchmarkError, match="--foreign-limit"):
        common.take_pairs(
            {},
            {"wanma": lambda: {"foreign_cpu": 1.0}},
            pairs=2,
            noise=common.Noise(0.1, 0),
            deadline=float("inf"),
            save=lambda: None,
        )


def test_results_are_found_again_by_their_settings(common, tmp_path):
    path = tmp_path / "results" / "train.json"
    results = common.Results(path)
    results.piece({"ranks": 2}, fresh=False)["pairs"].append({"date": "then"})
    results.save("# report\n")
    again = common.Results(path)
    assert again.piece({"ranks": 2}, fresh=False)["pairs"] == [{"date": "then"}]
    assert again.piece({"ranks": 8}, fresh=False)["pairs"] == []
    assert again.piece({"ranks": 2}, fresh=True)["pairs"] == []
    assert (tmp_path / "results" / "train.md").read_text() == "# report\n"


# run_command makes its process the parent of all orphans below it and ends them: not in pytest's own process.
PROGRAM = """
import json, os, sys
from pathlib import Path
from benchmarks.common import BenchmarkError, run_command
from wanma.bench.meter.process_tree import own_cpu_seconds
before = own_cpu_seconds()
try:
    run_command(["bash", "-c", sys.argv[1]], os.environ, Path(sys.argv[2]), float(sys.argv[3]))
    error = ""
except BenchmarkError as raised:
    error = str(raised)
print(json.dumps({"own": own_cpu_seconds() - before, "error": error}))
"""


def run(script, tmp_path, timeout=20.0):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, script, str(tmp_path / "log"), str(timeout)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_cpu_time_of_an_orphaned_descendant_counts_as_the_commands_own(tmp_path):
    spin = "timeout 0.5 sh -c 'while :; do :; done'"
    found = run(f"(({spin}) & ) ; sleep 0.8", tmp_path)
    assert found["error"] == ""
    assert found["own"] > 0.1


def test_a_process_left_behind_is_ended_and_named(tmp_path):
    found = run("(sleep 60 &)", tmp_path)
    assert "left processes behind" in found["error"]
    assert "sleep" in found["error"]


def test_a_failed_command_shows_the_end_of_its_output(tmp_path):
    found = run("echo the cause; exit 3", tmp_path)
    assert "ended with code 3" in found["error"]
    assert "the cause" in found["error"]


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    found = run("sleep 60", tmp_path, timeout=0.2)
    assert "took more than 0 s" in found["error"]
