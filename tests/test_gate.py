"""The gate of continuous integration tells broken tests from flaky ones, ends in time, and starts clean."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from support.gate import environments, scratch
from support.gate.order import is_pure, place_of, unit_of
from support.gate.records import Record, is_drawn, read_records
from support.gate.verdict import MOST_FLAKY, MOST_LINES, Failure, Verdict, reason_against_repeat
from support.git import git, repository, write
from support.slowness import VARIABLE, patient

HERE = Path(__file__).parent
SETTINGS = f"""\
[pytest]
markers =
  daily
  full
  exhaustive
  gpu
  root
addopts = --max-worker-restart=0
testpaths = tests
pythonpath = {HERE}
"""
FLAKY = """
from pathlib import Path
def test_every_second_time():
    state = Path(__file__).with_name("state")
    was_there = state.exists()
    state.unlink() if was_there else state.touch()
    assert was_there, "the first time"
"""
BROKEN = "def test_never(): assert not 'what is wrong'\n"
NUMBERS = """
from pathlib import Path
def test_numbers():
    state = Path(__file__).with_name("numbers")
    losses = [1.0] if state.exists() else [2.0]
    state.touch()
    assert losses == [1.0]
"""
GRID = """
import pytest
@pytest.mark.full
@pytest.mark.parametrize("number", range(40))
def test_grid(number): pass
@pytest.mark.full(always=True)
def test_of_a_cluster(): pass
def test_of_every_day(): pass
"""


def gate(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "tests").mkdir(exist_ok=True)
    shutil.copy(HERE / "conftest.py", folder / "tests")
    (folder / "pytest.ini").write_text(SETTINGS)
    for name, source in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "support.gate", "--at-once", "0", "--evidence", "evidence", *options]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )


def test_a_failure_is_broken_or_flaky_and_unlike_numbers_are_never_repeated(tmp_path: Path) -> None:
    ran = gate(tmp_path, broken=BROKEN, flaky=FLAKY, numbers=NUMBERS, fine="def test_fine(): pass\n")
    lines = (tmp_path / "evidence" / "verdict").read_text().splitlines()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "fails alone, 2 times" in next(
        line for line in lines if line.startswith("BROKEN tests/test_broken.py")
    )
    assert "never repeated" in next(line for line in lines if line.startswith("BROKEN tests/test_numbers.py"))
    assert lines[-1] == "1 passed, 2 failed, 0 skipped, 1 flaky: tests/test_flaky.py::test_every_second_time"
    causes = {
        Path(one.test.partition("::")[0]).name: one.cause for one in read_records(tmp_path / "evidence")
    }
    assert causes["test_flaky.py"].startswith("AssertionError: the first time")
    assert (
        "| tests/test_flaky.py::test_every_second_time |" in (tmp_path / "evidence" / "flaky.md").read_text()
    )


def test_a_run_with_a_flaky_test_is_green_and_says_so(tmp_path: Path) -> None:
    ran = gate(tmp_path, flaky=FLAKY)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1].startswith(
        "0 passed, 0 failed, 0 skipped, 1 flaky: tests/test_flaky.py"
    )


def test_a_skip_that_is_not_allowed_is_red_beside_a_flaky_test_too(tmp_path: Path) -> None:
    skips = (
        "import pytest\ndef test_one(): pytest.skip('needs a GPU')\ndef test_two(): pytest.skip('no ship')\n"
    )
    ran = gate(tmp_path, "--no-skips-except=gpu", flaky=FLAKY, skips=skips)
    assert ran.returncode == 1
    verdict = ran.stdout.partition("== verdict")[2].splitlines()
    assert [line for line in verdict if line.startswith("RED")] == [
        "RED: skipped: tests/test_skips.py::test_two: no ship"
    ]
    assert verdict[-1].startswith("0 passed, 0 failed, 2 skipped, 1 flaky")


def test_a_share_of_the_full_suite_runs_and_what_its_time_leaves_out_is_counted(tmp_path: Path) -> None:
    ran = gate(tmp_path, "--share=0.5", grid=GRID)
    number = len(read_records(tmp_path / "evidence"))
    assert 5 < number < 36
    assert (ran.returncode, ran.stdout.splitlines()[-1].partition(",")[0]) == (0, f"{number} passed")
    over = gate(tmp_path, "--share=1", "--full-minutes=0", grid=GRID)
    assert over.returncode == 0, over.stdout
    assert "40 of tests/test_grid.py" in over.stdout
    assert over.stdout.splitlines()[-1] == "2 passed, 0 failed, 0 skipped, 0 flaky"
    late = gate(tmp_path, "--last-minutes=0", grid=GRID)
    assert late.returncode == 1
    assert "before the tests of every day had run" in late.stdout
    assert "RED: no test ran" in late.stdout


def test_a_run_in_which_nothing_is_collected_or_a_file_cannot_be_read_is_red(tmp_path: Path) -> None:
    ran = gate(tmp_path, wrong="import no_such_module\n")
    assert ran.returncode == 1
    assert "no_such_module" in ran.stdout
    assert ran.stdout.splitlines()[-1].startswith("0 passed, 1 failed")


def test_the_draw_follows_from_its_name_and_takes_its_share() -> None:
    tests = [f"test_{number}" for number in range(2000)]
    first = [test for test in tests if is_drawn(test, 0.25, "a1b2c3d")]
    assert first == [test for test in tests if is_drawn(test, 0.25, "a1b2c3d")]
    assert first != [test for test in tests if is_drawn(test, 0.25, "b1b2c3d")]
    assert 400 < len(first) < 600
    assert all(is_drawn(test, 1.0, "any") for test in tests)


def test_what_has_no_chance_in_it_is_not_repeated(tmp_path: Path) -> None:
    sources = {
        "tests/job/test_a.py": "",
        "tests/job/test_b.py": "import subprocess",
        "tests/e2e/test_c.py": "",
    }
    write(tmp_path, sources)

    def reason(test: str, cause: str = "assert 1 == 2", text: str = "") -> str:
        return reason_against_repeat(Record(test, "failed", cause=cause, text=text), tmp_path)

    assert reason("tests/job/test_a.py::test") == "a pure function"
    assert reason("tests/job/test_b.py::test") == ""
    assert reason("tests/e2e/test_c.py::test") == ""
    assert reason("tests/e2e/test_c.py::test", text=">   same_bits(one, other)\nE   assert 1 == 2") != ""
    late = "Failed: Timeout >300.0s"
    assert reason("tests/e2e/test_c.py::test", late, ">   same_bits(one, run())") == ""
    assert reason("tests/e2e/test_c.py") != "", "a file that cannot be collected"


def test_many_flaky_tests_are_red_and_the_verdict_is_short() -> None:
    flaky = [Failure(Record(f"test_{number}", "failed")) for number in range(MOST_FLAKY + 1)]
    assert Verdict(1, 0, flaky=flaky[1:]).is_green
    assert not Verdict(1, 0, flaky=flaky).is_green
    long = Verdict(
        1, 0, broken=[Failure(Record(f"test_{n}", "failed"), "why") for n in range(200)], reasons=["no time"]
    )
    assert len(long.lines()) <= MOST_LINES
    assert long.lines()[0] == "RED: no time"
    assert long.lines()[-1] == "1 passed, 200 failed, 0 skipped, 0 flaky"


def test_what_dead_runs_left_goes_and_what_living_ones_hold_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead: Callable[[], int]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = scratch.new_folder()
    gone = tmp_path / "wanma-test-gone"
    gone.mkdir()
    (gone / scratch.OWNER).write_text(f"{dead()} 12345")
    rescued = tmp_path / "wanma-rescued-1"
    rescued.mkdir()
    orphan = subprocess.Popen(["sleep", "600"], env={**os.environ, "TMPDIR": str(gone)})
    while str(gone).encode() not in Path(f"/proc/{orphan.pid}/environ").read_bytes():
        time.sleep(0.01)  # it is not yet `sleep`
    removed = list(scratch.remove_leftovers())
    assert orphan.wait(10) == -9
    assert str(gone) in removed
    assert not gone.exists()
    assert living.exists()
    assert rescued.exists()


@pytest.mark.root
def test_a_namespace_of_a_dead_process_goes(dead: Callable[[], int]) -> None:
    names = [f"{scratch.PREFIX}{pid}-gate" for pid in (dead(), os.getpid())]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode:
                pytest.skip("no network namespaces can be made here")
        removed = list(scratch.remove_leftovers())
        assert f"network namespace {names[0]}" in removed
        assert not Path("/run/netns", names[0]).exists()
        assert Path("/run/netns", names[1]).exists()
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_run_of_its_own_sees_neither_home_nor_caches(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "wanma").mkdir(parents=True)
    (home / ".cache" / "wanma" / "calibration.json").write_text('{"version": 999}')
    program = (
        "import os, tempfile; from pathlib import Path; "
        "from wanma.planner.hardware_model.calibration import load_calibration; "
        "load_calibration(); print(tempfile.gettempdir(), os.environ['TORCHINDUCTOR_CACHE_DIR'], sep='\\n'); "
        "print(Path.home(), os.environ['PIP_CACHE_DIR'], sep='\\n')"
    )
    environment = {name: word for name, word in os.environ.items() if not name.startswith(("XDG_", "PIP_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(tmp_path)}
    command = [
        sys.executable,
        str(HERE / "support" / "gate" / "scratch.py"),
        "run",
        sys.executable,
        "-c",
        program,
    ]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    temporary, inductor, own_home, pip = map(Path, ran.stdout.split())
    assert temporary.parent == tmp_path
    assert {temporary} == {inductor.parent, own_home.parent}
    assert pip == home / ".cache" / "pip", "downloads are kept for later runs"
    assert not temporary.exists(), "it goes with a run that succeeded"


@pytest.fixture
def dead() -> Callable[[], int]:
    """Returns the number of a process that is no more."""

    def dead() -> int:
        process = subprocess.Popen(["true"])
        process.wait()
        return process.pid

    return dead


def test_no_test_stands_twice_in_the_list_of_flaky_tests() -> None:
    """List of flaky tests, without repetition: one that was flaky twice is mended at the root, or deleted."""
    path = HERE / "flaky.md"
    rows = [line.split(" | ") for line in path.read_text().splitlines()[4:]] if path.exists() else []
    counts = Counter(row[3] for row in rows)
    assert [test for test, count in counts.items() if count > 1] == []


def test_pure_files_come_first_and_files_of_one_cluster_are_one_unit_of_work() -> None:
    files = sorted(HERE.rglob("test_*.py"), key=place_of)
    pure = [is_pure(file) for file in files]
    assert pure == sorted(pure, reverse=True)
    assert is_pure(HERE / "planner" / "search" / "test_best.py")
    assert not is_pure(HERE / "faults" / "test_matrix.py")
    on_slurm = [file for file in files if "\nfrom support.slurm import" in file.read_text()]
    assert {unit_of(file) for file in on_slurm} == {("slurm", 1)}
    assert files[sum(pure)] in on_slurm


def test_a_change_needs_the_environments_of_the_tests_near_it(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {"tests/api/test_launch_jax.py"}
    monkeypatch.setattr(environments, "changed_files", lambda _: changed)
    assert environments.targets_for("HEAD") == ["frameworks"]
    changed.add("constraints.txt")
    assert environments.targets_for("HEAD") == list(environments.TARGETS)


def test_a_limit_is_longer_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2.5")
    assert patient(5) == 13
    monkeypatch.setenv(VARIABLE, "1.0")
    assert patient(5) == 5


def test_the_fast_form_keeps_its_environment_and_tests_what_is_committed(tmp_path: Path) -> None:
    makefile = """\
setup: .venv/.ready
.venv/.ready: constraints.txt
\t@mkdir -p .venv/bin && echo 'echo peers' > .venv/bin/python && chmod +x .venv/bin/python
\t@echo ready >> .venv/made && touch $@
peers:
\t@touch .venv-peers
"""
    run = """\
mkdir -p build/ci && touch rest
cat .venv/made version > build/ci/verdict
ls -A > build/ci/files
"""
    top = repository(
        tmp_path / "top",
        {
            ".ci/in-a-clone": (HERE.parent / ".ci" / "in-a-clone").read_text(),
            ".ci/run": run,
            ".gitignore": "/.venv*\n/build/\n",
            "Makefile": makefile,
            "constraints.txt": "",
            "version": "1\n",
        },
    )
    clone = top / "build" / "ci-fast" / "main"
    write(top, {".venv/.ready": "", ".venv/bin/tool": f"#!{top}/.venv/bin/python\n", ".venv/here": ""})

    def tested(files: dict[str, str]) -> list[str]:
        """Commit the files and run the fast form; what its `.ci/run` finds."""
        write(top, files)
        git(top, "commit", "-q", "-a", "-m", "next")
        write(top, {"version": "not committed\n"})
        command = ["bash", ".ci/in-a-clone", "fast", "HEAD~1"]
        ran = subprocess.run(command, cwd=top, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found = {*(top / "build" / "ci" / "files").read_text().split()}
        tracked = {".ci", ".gitignore", "Makefile", "constraints.txt", "version"}
        assert found == {*tracked, ".git", ".venv", ".venv-peers", "build", "rest"}
        return (top / "build" / "ci" / "verdict").read_text().split()

    assert tested({"version": "2\n"}) == ["ready", "2"]
    assert (clone / ".venv" / "here").exists(), "it begins as a copy of the environment here"
    assert (clone / ".venv" / "bin" / "tool").read_text() == f"#!{clone}/.venv/bin/python\n"
    assert (top / ".venv" / "bin" / "tool").read_text() == f"#!{top}/.venv/bin/python\n"
    assert not (top / ".venv" / "made").exists()
    write(clone, {"of-the-run-before": "", "version": "of the run before\n"})
    assert tested({"version": "3\n"}) == ["ready", "3"]
    assert tested({"version": "4\n", "constraints.txt": "torch==2\n"}) == ["ready", "ready", "4"]
