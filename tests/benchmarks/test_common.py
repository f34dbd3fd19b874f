"""Shared parts of the benchmarks: statistics, repetition of disturbed samples, CPU time."""

import argparse
import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
from itertools import count, repeat
from pathlib import Path

import pytest

from wanma.bench.measurements.measurement import MachineUsage

ROOT = Path(__file__).resolve().parents[2]


def meter_of(usages):
    """Make a meter that finds the machine in these states, one a sample."""

    class Meter(contextlib.nullcontext):
        def __enter__(self):
            return argparse.Namespace(usage=next(usages))

    return Meter


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.common")
    monkeypatch.setattr(module, "MachineMeter", meter_of(repeat(MachineUsage(foreign_cpu=0.0))))
    return module


def options(**changes):
    usual = {"pairs": 2, "foreign_limit": 0.1, "retries": 0, "deadline": math.inf}
    return argparse.Namespace(**{**usual, **changes})


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

    parsed = run.parse()
    parsed.report = False
    with pytest.raises(SystemExit, match="error: wait for a quiet machine"):
        common.carry_out(parsed, fail, run.report)


def sample(common, foreign, retries):
    rule = common.disturbance_rule(options())
    return common.take_sample(lambda: {"foreign_cpu": next(foreign)}, rule, retries)


def test_a_disturbed_sample_is_repeated_until_it_is_quiet(common):
    found = sample(common, iter([0.8, 0.5, 0.01]), retries=2)
    assert found == {"foreign_cpu": 0.01, "disturbed": False, "repeated": 2}


def test_a_sample_that_never_was_quiet_is_flagged(common):
    found = sample(common, iter([0.8, 0.8]), retries=1)
    assert found == {"foreign_cpu": 0.8, "disturbed": True, "repeated": 1}


def test_a_sample_is_taken_under_the_meter_and_by_all_its_rules(common, monkeypatch):
    """The meter tells of a clock that others have lowered, which no CPU time shows."""
    usages = (MachineUsage(foreign_cpu=0.02, clock_hertz=(hertz, hertz)) for hertz in (3.0e9, 2.0e9))
    monkeypatch.setattr(common, "MachineMeter", meter_of(usages))
    rule = common.disturbance_rule(options())
    found = [common.take_sample(dict, rule, 0) for _ in range(2)]
    assert [(one["foreign_cpu"], one["disturbed"]) for one in found] == [(0.02, False), (0.02, True)]


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
            piece, contenders, options(pairs=pairs), save=lambda: saved.append(len(piece["pairs"]))
        )
    # Every other round has them the other way round.
    assert order == ["wanma", "peer", "peer", "wanma", "wanma", "peer"]
    assert saved == [1, 2, 3]


def test_no_round_starts_after_the_deadline(common):
    piece = {}
    assert not common.take_pairs(piece, {}, options(deadline=0.0), save=lambda: None)
    assert piece["pairs"] == []


def test_disturbed_rounds_are_kept_but_not_counted(common):
    foreign = (0.9 if number == 1 else 0.0 for number in count())
    piece = {}
    contenders = {"wanma": lambda: {"foreign_cpu": next(foreign)}, "peer": lambda: quiet(1)}
    common.take_pairs(piece, contenders, options(), save=lambda: None)
    assert [taken["wanma"]["disturbed"] for taken in piece["pairs"]] == [False, True, False]
    assert len(common.undisturbed(piece)) == 2
    assert common.rounds_text(piece) == "2 (1 disturbed)"


def test_a_machine_that_never_is_quiet_ends_the_measurement_with_advice(common):
    with pytest.raises(common.BenchmarkError, match="--foreign-limit"):
        common.take_pairs({}, {"wanma": lambda: {"foreign_cpu": 1.0}}, options(), save=lambda: None)


def test_the_verdict_is_of_undisturbed_rounds_and_knows_which_way_is_faster(common):
    def taken(wanma, peer, disturbed=False):
        both = {"wanma": wanma, "peer": peer}
        return {who: {"speed": v, "seconds": 1 / v, "disturbed": disturbed} for who, v in both.items()}

    rounds = [taken(1.10 + noise, 1.0) for noise in (0.0, 0.01, -0.01, 0.02, -0.02, 0.015, 0.005)]
    piece = {"pairs": [*rounds, taken(0.1, 1.0, disturbed=True)]}
    assert common.ratios(piece, metric="speed") == [one["wanma"]["speed"] for one in rounds]
    assert [common.verdict(piece, metric=name).outcome for name in ("speed", "seconds")] == ["faster"] * 2
    assert common.verdict(piece, "peer", "wanma", "seconds").outcome == "slower"
    assert common.verdict({"pairs": rounds[:2]}, metric="speed").outcome == "cannot tell"
    # With as many comparisons as to expect such a difference by chance, nothing is claimed.
    assert common.verdict(piece, metric="speed", comparisons=10**6).outcome == "cannot tell"


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
before = sum(os.times()[:4])
try:
    run_command(["bash", "-c", sys.argv[1]], os.environ, Path(sys.argv[2]), float(sys.argv[3]))
    error = ""
except BenchmarkError as raised:
    error = str(raised)
print(json.dumps({"own": sum(os.times()[:4]) - before, "error": error}))
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
