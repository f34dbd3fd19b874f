"""Benchmarks from suite to result: figures, continuation, reproduction, command line."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.peer_environments import link_environments
from wanma.bench.benchmark import find_unfinished, new_directory, reproduce, run_benchmark
from wanma.bench.meter.disturbance import DisturbanceLimits
from wanma.bench.programs.contender import Contender
from wanma.bench.results.directory import ResultDirectory
from wanma.bench.runner import Rule
from wanma.bench.stored_suite import SUITE_FILE, read_stored_suite
from wanma.bench.suites.suite_file import Suite, known_suites
from wanma.bench.suites.suite_of_commands import suite_of_commands
from wanma.cli.main import main
from wanma.job.errors import EXIT_USAGE, WanmaError

ANY = DisturbanceLimits(foreign_cpu=1e9, clock_share=0.0)
STEPS = 30
TEXT = """\
import random
random.seed({seed})
for _ in range({steps}):
    print("wanma step", "samples", 8, "seconds", {scale} * (1 + 0.01 * random.random()))
"""
"""Program that reports step times of its own: no test depends on the speed of this machine."""


def program(scale: float, seed: int) -> list[str]:
    return [sys.executable, "-S", "-c", TEXT.format(scale=scale, seed=seed, steps=STEPS)]


def suite_of(*scales: float) -> tuple[Suite, Rule]:
    commands = [program(scale, seed) for seed, scale in enumerate(scales)]
    suite, _ = suite_of_commands(commands, patterns={})
    named = [
        replace(contender, name=name) for contender, name in zip(suite.contenders, "ABCDEF", strict=False)
    ]
    return replace(suite, contenders=tuple(named)), Rule(rounds=5, precision=1e-9)


def run(suite: Suite, rule: Rule, root: Path) -> ResultDirectory:
    directory = new_directory(root, suite)
    run_benchmark(suite, rule, directory, limits=ANY, progress=lambda _: None)
    return directory


def test_a_planted_difference_is_found_and_none_is_not_claimed(tmp_path: Path) -> None:
    directory = run(*suite_of(1.0, 1.05, 1.0), tmp_path)
    result = directory.read()
    verdicts = result.verdicts
    assert result.baseline == "A"
    assert str(verdicts["B"]["step_seconds"].outcome) == "slower"
    assert str(verdicts["C"]["step_seconds"].outcome) == "cannot tell"
    assert result.summaries["A"]["step_seconds"].median == pytest.approx(1.005, rel=0.01)
    assert result.summaries["B"]["samples_per_second"].median == pytest.approx(8 / 1.055, rel=0.01)
    assert len(result.measurements) == 15
    assert result.ended
    page = directory.page.read_text()
    assert "<html" in page
    assert result.rule["limits.foreign_cpu"] == ANY.foreign_cpu
    assert "<td>limits.clock_share</td><td>0.0</td>" in page
    assert result.environment["wanma"]
    assert result.code["hash"]
    assert result.hardware["cores"] >= 1


def test_a_benchmark_that_was_stopped_goes_on(tmp_path: Path) -> None:
    suite, rule = suite_of(1.0, 2.0)
    directory = new_directory(tmp_path, suite)

    def stop(text: str) -> None:
        if text.startswith("round 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_benchmark(suite, rule, directory, limits=ANY, progress=stop)
    assert len(directory.read_measurements()) == 3
    newer = tmp_path / "20991231-000000-damaged"
    newer.mkdir()
    (newer / "result.json").write_text("{")
    found = find_unfinished(tmp_path, suite)
    assert found is not None
    assert found.path == directory.path
    assert find_unfinished(tmp_path, suite_of(1.0, 3.0)[0]) is None, "another suite"
    result = run_benchmark(suite, rule, found, limits=ANY, progress=lambda _: None)
    assert len(result.measurements) == 10
    assert find_unfinished(tmp_path, suite) is None


def test_a_result_can_be_run_again(tmp_path: Path) -> None:
    suite, rule = suite_of(1.0)
    stored = run(suite, rule, tmp_path)
    again = read_stored_suite(stored)
    assert (again.suite.contenders, again.rule, again.limits) == (suite.contenders, rule, ANY)
    figures, directory = reproduce(stored, tmp_path, lambda _: None)
    (figure,) = [one for one in figures if one.metric == "step_seconds"]
    assert figure.decision.value == "within"
    assert directory.path != stored.path


def test_a_benchmark_that_runs_is_joined_by_nobody(tmp_path: Path) -> None:
    suite, rule = suite_of(1.0)
    directory = new_directory(tmp_path, suite)
    found: list[object] = []

    def join(_: str) -> None:
        found.append(find_unfinished(tmp_path, suite))
        with pytest.raises(WanmaError, match="another process measures in"):
            run_benchmark(suite, rule, directory, limits=ANY, progress=lambda _: None)

    run_benchmark(suite, Rule(rounds=1), directory, limits=ANY, progress=join)
    assert found == [None]


def test_an_unfinished_result_is_not_compared_with_itself(tmp_path: Path) -> None:
    suite, rule = suite_of(1.0)
    stored = run(suite, rule, tmp_path)
    stored.write_result(replace(stored.read(), ended=""))
    with pytest.raises(WanmaError, match="has not ended"):
        reproduce(stored, tmp_path, lambda _: None)


def test_secrets_stay_in_the_file_of_their_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that prints what it was given, and fails: its error has the end of its output."""
    monkeypatch.setenv("HF_TOKEN", "geheim-inherited")
    text = "import os, sys; print(sys.argv[1:], os.environ['API'], os.environ['HF_TOKEN']); sys.exit(3)"
    options = ["--token=geheim-1", "--api-key", "geheim-2", "-H", "Authorization: Bearer geheim-3", "-v"]
    suite, _ = suite_of_commands(
        [["env", "DB_PASSWORD=geheim-4", sys.executable, "-c", text, *options]], patterns={}
    )
    (contender,) = suite.contenders
    assert "geheim" not in contender.name
    contender = replace(contender, environment={"API": "geheim-5", "MY_KEY": "geheim-6"})
    suite = replace(suite, contenders=(contender,))
    directory = new_directory(tmp_path, suite)
    with pytest.raises(WanmaError, match="ended with exit code 3") as failed:
        run_benchmark(suite, Rule(rounds=1), directory, limits=ANY, progress=print)
    assert "$API $HF_TOKEN" in failed.value.message
    csv = str(tmp_path / "csv")
    assert main(["bench", "export", str(directory.path), "--format", "csv", "--out", csv]) == 0
    kept = SUITE_FILE, "output.log"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in kept]
    names = {path.name for path in files}
    assert names >= {"result.json", "page.html", "0000.json", "steps.csv", "figures.csv"}
    assert [path.name for path in tmp_path.rglob("*") if "geheim" in path.name] == []
    assert [path.name for path in files if "geheim" in path.read_text()] == []
    printed = capsys.readouterr()
    assert "geheim" not in printed.out + printed.err + str(failed.value)
    assert "geheim-6" in (directory.path / SUITE_FILE).read_text()
    assert (directory.path / SUITE_FILE).stat().st_mode & 0o077 == 0


def test_a_wrong_key_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[model]\npreset = "gpt-1m"\n')
    assert bench("train", "mine.toml", "--over", "parallel.tpp=1,2") == 2
    assert "parallel.tp" in capsys.readouterr().err
    assert bench("list") == 0
    assert "there are no results" in capsys.readouterr().out


def test_a_benchmark_in_which_nothing_succeeds_is_an_error(tmp_path: Path) -> None:
    suite, rule = suite_of_commands([[sys.executable, "-c", "raise SystemExit('no data')"]], patterns={})
    with pytest.raises(WanmaError, match="ended with exit code 1\n    no data"):
        run(suite, rule, tmp_path)


def test_settings_of_a_job_reach_its_runs(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text to learn " * 400)
    job = (
        f'[model]\npreset = "gpt-1m"\n[data]\ntext = ["{tmp_path}/text.txt"]\nsequence_length = 32\n'
        "[train]\nsteps = 2\nglobal_batch = 2\n"
    )
    contender = Contender("two", "job", "job.toml", {"train.global_batch": "4"})
    suite = replace(suite_of(1.0)[0], contenders=(contender,), job_text=job)
    result = run(suite, Rule(rounds=1, steps=3), tmp_path).read()
    (measurement,) = result.measurements
    assert not measurement.error
    assert [step.samples for step in measurement.steps] == [4.0, 4.0, 4.0]
    (record,) = result.contenders
    assert "global_batch = 4" in record.job
    assert record.plan is not None
    assert record.plan["plan"]["micro_batch"] >= 1


def bench(*words: str) -> int:
    return main(["bench", *words])


def test_the_commands_measure_list_show_export_and_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(TEXT.format(scale=1.0, seed=1, steps=STEPS))
    options = ["--rounds", "3", "--foreign-limit", "1000", "--precision", "0.0001"]
    assert bench("run", *options, "--", sys.executable, "a.py") == 0
    assert "Step time" in capsys.readouterr().out
    assert bench("run", *options, "--command", f"{sys.executable} a.py") == 0
    capsys.readouterr()
    first, second = sorted(path.name for path in Path("bench-results").glob("*-commands*"))
    assert bench("list") == 0
    assert first in capsys.readouterr().out
    assert bench("show", first) == 0
    assert "Samples per second" in capsys.readouterr().out
    assert bench("compare", first, second) == 0
    assert "cannot tell" in capsys.readouterr().out
    assert bench("export", first, "--out", "exported") == 0
    assert (tmp_path / "exported" / "steps.csv").read_text().count("\n") == 3 * STEPS + 1
    assert bench("export", first, "--out", "a.py") == EXIT_USAGE
    assert "a.py" in capsys.readouterr().err
    assert bench("show", "no-such-result") != 0
    assert "no-such-result" in capsys.readouterr().err


SUITES_OF_MODELS_OR_PEERS = frozenset(
    ("ddp-peers", "huggingface", "long-context", "lora", "mixed", "sharded-peers")
)
"""Suites that measure by the road of another one: a model of its own, or programs of peers."""


@pytest.mark.timeout(900)  # DeepSpeed compiles a kernel at its first use on a machine
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] * (name in SUITES_OF_MODELS_OR_PEERS))
        for name in known_suites()
    ],
)
def test_a_shipped_suite_works_in_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environments = link_environments(tmp_path / "environments")
    assert bench("smoke", name, "--environments", str(environments)) == 0
    output = capsys.readouterr().out
    if "it needs the Python environment" in output:
        pytest.skip("needs environments: make peers frameworks")
    assert "works" in output
