"""Python environments of commands: found, checked against their pins, recorded; never made by themselves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from support.wheels import make_wheel
from wanma.bench.benchmark import new_directory, run_benchmark
from wanma.bench.comparisons.comparison import find_differences
from wanma.bench.meter.disturbance import NO_LIMITS
from wanma.bench.presentation.result_blocks import package_lines
from wanma.bench.programs.contender import Contender
from wanma.bench.programs.python_environment import (
    FOLDER_VARIABLE,
    PythonEnvironment,
    environments_folder,
    program_variables,
)
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.cli.main import main
from wanma.job.errors import WanmaError

PROGRAM = """\
import os, sys, framework
assert "PYTHONPATH" not in os.environ
print("wanma step loss", framework.LOSS, "samples 2 seconds 0.01")
print("wanma figure prefix", int(sys.prefix == os.environ["VIRTUAL_ENV"]))
"""
SUITE = """\
[[contenders]]
name = "framework"
python_environment = "mine"
command = ["{python}", "{suite}/train.py"]

[rule]
rounds = 1
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of environments with a real one, in which a package of version 1.5+local is installed."""
    folder = tmp_path_factory.mktemp("environments")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "mine"], check=True)
    (site,) = (folder / "mine" / "lib").glob("python*/site-packages")
    (site / "framework.py").write_text("LOSS = 2.5\n")
    install(site, "1.5+local")
    return folder


def install(site: Path, version: str) -> None:
    for old in site.glob("My_Framework-*"):
        (old / "METADATA").unlink()
        old.rmdir()
    metadata = site / f"My_Framework-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: My_Framework\nVersion: {version}\n")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "mine.txt").write_text("# the framework\nmy-framework==1.5\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    path = tmp_path / "own.toml"
    path.write_text(SUITE)
    return path


def python_environment(suite: Path, folder: Path) -> PythonEnvironment:
    (found,) = read_suite_or_job(suite, environments=folder)[0].python_environments
    return found


def test_a_command_runs_in_its_environment_and_the_result_has_all_versions(
    environment: Path, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    found, rule = read_suite_or_job(suite, environments=environment)
    directory = new_directory(tmp_path, found)
    result = run_benchmark(found, rule, directory, limits=NO_LIMITS, progress=lambda _: None)
    (measurement,) = result.measurements
    assert measurement.error == ""
    assert measurement.steps[0].loss == 2.5
    assert measurement.figures["prefix"] == 1
    python = ".".join(map(str, sys.version_info[:3]))
    assert directory.read().contender("framework").packages == {
        "python": python,
        "My_Framework": "1.5+local",
    }
    assert package_lines(result) == [f"framework: python {python}"], "the others are not frameworks we know"
    assert "My_Framework 1.5+local" in directory.page.read_text()
    other = replace(result.contenders[0], packages={"python": python})
    assert "version of framework: My_Framework" in [
        one.subject for one in find_differences(result, replace(result, contenders=(other,)))
    ]


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, results = tmp_path / "none here", tmp_path / "results"
    assert main(["bench", "train", str(suite), "--environments", str(folder), "--results", str(results)]) == 2
    message = capsys.readouterr().err
    assert f"{folder}/mine/bin/python" in message
    assert not folder.exists(), "nothing is installed unasked"
    make_wheel(tmp_path / "wheels", "my_framework", "1.5")
    (creation,) = [line.partition("make it: ")[2] for line in message.splitlines() if "make it: " in line]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")  # a constraint there would be one more requirement
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    subprocess.run(creation, shell=True, check=True)
    assert python_environment(suite, folder).check()["my_framework"] == "1.5"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("my_framework==1.6", r"1\.5\+local instead of 1\.6"),
        ("my-framework==1.5+other", r"1\.5\+local instead of 1\.5\+other"),
        ("my.framework==1.5 \\\n    --hash=sha256:1\nother==2", r"other 2 is missing"),
        ("my-framework==1.5  # all\n\nnumpy>=2\n", r"mine\.txt:3: 'numpy>=2' pins no version"),
    ],
)
def test_another_version_than_the_pinned_one_is_refused(
    environment: Path, suite: Path, pins: str, message: str
) -> None:
    path = suite.parent / "environments" / "mine.txt"
    path.write_text(pins)
    with pytest.raises(WanmaError, match=message):
        python_environment(suite, environment).check()


def test_a_benchmark_does_not_go_on_with_other_versions(
    environment: Path, suite: Path, tmp_path: Path
) -> None:
    found, rule = read_suite_or_job(suite, environments=environment)
    directory = new_directory(tmp_path, found)
    run_benchmark(found, rule, directory, limits=NO_LIMITS, progress=lambda _: None)
    (site,) = (environment / "mine" / "lib").glob("python*/site-packages")
    install(site, "1.5+rebuilt")
    try:
        with pytest.raises(WanmaError, match=r"1\.5\+local then, 1\.5\+rebuilt now") as refused:
            run_benchmark(found, rule, directory, limits=NO_LIMITS, progress=lambda _: None)
    finally:
        install(site, "1.5+local")
    assert "--fresh" in refused.value.hint


def test_a_damaged_environment_is_refused(suite: Path, tmp_path: Path) -> None:
    python = tmp_path / "all" / "mine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(WanmaError, match=r"does not work: broken"):
        python_environment(suite, tmp_path / "all").check()


def test_the_folder_of_environments_is_given_by_option_or_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    assert environments_folder() == Path("bench-environments")
    monkeypatch.setenv(FOLDER_VARIABLE, "/all")
    assert environments_folder() == Path("/all")
    assert environments_folder(Path("mine")) == Path("mine")


def test_an_environment_goes_with_its_contender(environment: Path, suite: Path) -> None:
    found, _ = read_suite_or_job(suite, environments=environment)
    (contender,) = found.contenders
    assert contender.python_environment is not None
    assert Contender.from_json(contender.to_json()) == contender
    plain = replace(contender, python_environment=None)
    assert "python_environment" not in plain.to_json(), "the hash of other suites stays"
    assert Contender.from_json(plain.to_json()) == plain


def test_modules_of_a_contender_come_before_those_of_the_caller() -> None:
    caller = {"PYTHONPATH": "/caller", "HOME": "/home"}
    assert program_variables(None, {"PYTHONPATH": "/own"}, caller) == {
        "PYTHONPATH": "/own:/caller",
        "HOME": "/home",
    }
    assert program_variables(None, {}, caller) == caller
    assert program_variables(None, {}, {"HOME": "/home"}) == {"HOME": "/home"}


@pytest.mark.parametrize("key", ['python_environment = "mine"', "rank_variables = true"])
def test_keys_of_commands_are_refused_for_a_job(tmp_path: Path, key: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(f'job = {{model = {{preset = "gpt-1m"}}}}\n[[contenders]]\nname = "job"\n{key}\n')
    with pytest.raises(WanmaError, match="are for commands"):
        read_suite_or_job(path)
