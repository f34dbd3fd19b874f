"""The command line's manners: one message, the right exit code, no traceback for the user's mistakes."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanma.cli import main as main_module
from wanma.cli.installation import version
from wanma.cli.main import main
from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, WanmaError

JOB = 'model.preset = "gpt-1m"\n'


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian", "x.toml"], "error: unknown command 'trian'. Did you mean 'train'?\n"),
        (["gpt.toml"], "error: 'gpt.toml' is not a command.\n  to train it: wanma train gpt.toml\n"),
        (["train"], "error: wanma train: the following arguments are required: JOB\n"),
        (["train", "x.toml", "--dry-rn"], "unknown option --dry-rn. Did you mean '--dry-run'?"),
        (["train", "x.toml", "--train.steps=4"], "write overrides without dashes: train.steps=500"),
        (["train", "x.toml", "--dry"], "unknown option --dry. "),
        (
            ["train", "x.toml", "--lr", "1e-3"],
            "unknown option --lr\n  it is a key of the job: train.learning_rate=",
        ),
        (["train", "x.toml", "--steps=3"], "train.steps=VALUE"),
        (["cluster", "--calibrate"], "--calibrate\n  it is now `wanma bench machine --save`\n"),
        (["cluster", "--devices", "--calibrate=1"], "it is now `wanma bench machine --save`\n"),
        (["bench", "collectives", "--ranks", "2"], "it is now `wanma bench machine --collectives "),
        (["bench", "environment"], "wanma bench environment\n  it is now pip: `wanma bench train SUITE`"),
        (["runs", "extra"], "error: wanma runs: unexpected argument 'extra'"),
        (["--colour"], "error: wanma: unknown option --colour.\n  see `wanma --help`"),
        (["dashboard", "--port", "70000"], "argument --port: '70000' is not a port from 0 to 65535"),
        (["profile", "--timeout", "nan"], "argument --timeout: 'nan' is not a number"),
        (["job", "trian"], "error: the job file has no 'trian'. Did you mean 'train'?"),
        (["sample", "--prompt", "x", "--tokens", "many"], "argument --tokens: invalid int value: 'many'"),
        (["sample", "--prompt", "x", "--tokens", "0"], "--tokens 0: must be at least 1"),
        (["sample", "--prompt", "x", "--temperature", "-1"], "temperature = -1.0: must be 0 or more"),
        (["launch", "--ranks", "2"], "the following arguments are required: SCRIPT\n"),
        (["launch", "--ranks", "2", "none.py"], "error: there is no script none.py"),
        (["launch", __file__, "--ranks", "2"], f"--ranks N, at least 1, is missing before {__file__}"),
        (["launch", "--ranks", "0", __file__], f"for two processes: `wanma launch --ranks 2 {__file__}`"),
        (["launch", "--ranks", "2", "--show", "5", __file__], "--show 5: no such rank"),
        (["launch", "--ranks", "x", "none.py"], "argument --ranks: 'x' is not a number"),
        (["launch", "--rank", "2", __file__], "unknown option --rank. Did you mean '--ranks'?"),
        (
            ["launch", "--ranks", "2", "--set", "train.steps=4", __file__],
            "train.steps is not a key of [cluster]",
        ),
        (["launch", "--ranks", "2", "--nodes", "x", __file__], 'cluster.nodes = "x": must be a whole number'),
    ],
)
def test_a_wrong_command_line_is_one_message_with_the_way_out(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert told in complaint(capsys, *arguments)


def test_a_wrong_job_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "train.stpes = 3\n")
    text = complaint(capsys, "train", str(path), "--nodes", "0", "train.seed=x", "--rendezvous", "here")
    assert "job.toml:2: unknown key 'train.stpes'. Did you mean 'train.steps'?" in text
    assert 'train.seed = "x": must be a whole' in text
    assert "cluster.nodes = 0: must be" in text


def test_without_a_command_the_overview_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "wanma train JOB.toml --dry-run" in capsys.readouterr().out


def test_every_command_is_explained_in_the_overview_and_has_help_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def text(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words, "--help"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    listed = re.findall(r"^    (\w+)\s+\w", text(), re.MULTILINE)
    assert listed == [
        "init", "train", "plan", "render", "launch", "runs", "show", "report", "status", "attach",
        "cancel", "explain", "resize", "shell", "engines", "logs", "diagnose", "profile", "dashboard",
        "observe", "sample", "export", "checkpoint", "data", "doctor", "cluster", "bench", "job",
        "completion", "version",
    ]  # fmt: skip
    for command in listed:
        assert f"usage: wanma {command}" in text(command)


def test_the_exit_code_is_the_errors_own_and_colour_is_only_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise WanmaError("rank 3 died", "look at logs/rank-3.log", 17)

    monkeypatch.setattr(version, "run", fails)
    assert main(["version"]) == 17
    assert capsys.readouterr().err == "error: rank 3 died\n  look at logs/rank-3.log\n"
    monkeypatch.setattr(main_module, "_uses_color", lambda: True)
    main(["version"])
    assert capsys.readouterr().err.startswith("\x1b[1;31merror:\x1b[0m rank 3 died")


def test_a_bug_shows_its_traceback_and_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bug(_: object) -> int:
        return {}["missing"]

    monkeypatch.setattr(version, "run", bug)
    assert main(["version"]) == EXIT_FAILED
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text
    assert "a bug in wanma (KeyError)" in text


def test_a_file_that_the_user_may_not_read_is_no_bug_of_wanma(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "runs/gpt/job.toml")

    monkeypatch.setattr(version, "run", denied)
    assert main(["version"]) == EXIT_FAILED
    text = capsys.readouterr().err
    assert ("runs/gpt/job.toml" in text, "bug" in text, "Traceback" in text) == (True, False, False)


def test_version_names_what_a_report_of_a_problem_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.match(r"wanma \d+\.\d+\.\d+\npython 3\.\d+\.\d+\ntorch 2\.\d+", capsys.readouterr().out)


def wanma(*arguments: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "wanma", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_a_reader_that_leaves_early_causes_no_complaint() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        [sys.executable, "-m", "wanma", "job", "--toml"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", main_module.EXIT_BROKEN_PIPE)


def test_output_that_finds_a_full_disk_is_no_bug_of_wanma() -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "wanma", "job", "--toml"], stdout=full, stderr=subprocess.PIPE, text=True
        )
        told = process.communicate(timeout=60)[1]
    assert told == (
        "error: No space left on device: the output of this command\n  free some space on its disk\n"
    )
    assert process.returncode == 1


def test_ctrl_c_ends_a_command_with_one_word(tmp_path: Path) -> None:
    fifo = tmp_path / "job.toml"
    os.mkfifo(fifo)  # a job that never arrives: the command waits for it
    # Whoever runs the tests in the background has a shell that lets all its children ignore Ctrl-C.
    process = wanma("train", str(fifo), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    writer = opened_by_a_reader(fifo)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    os.close(writer)
    assert (text, process.returncode) == ("\nstopped\n", EXIT_INTERRUPTED)


@pytest.mark.parametrize("module", ["wanma.elastic", "wanma.job.errors", "wanma.cli.parser"])
def test_ctrl_c_during_the_first_imports_shows_no_traceback(module: str) -> None:
    program = (
        "import os, signal, sys\n"
        "class Interruption:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.argv = ['wanma', 'train', 'job.toml']\n"
        "from wanma.cli.main import main\n"
        "assert {name for name in sys.modules if name[:6] == 'wanma.'} == {'wanma.cli', 'wanma.cli.main'}\n"
        "sys.meta_path.insert(0, Interruption())\n"
        "sys.exit(main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.returncode) == ("\nstopped\n", EXIT_INTERRUPTED)


def opened_by_a_reader(fifo: Path) -> int:
    """The writing end, as soon as someone reads."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            assert time.monotonic() < deadline, "nobody read it"
            time.sleep(0.02)


def test_help_starts_without_the_slow_libraries() -> None:
    program = (
        "import sys\nfrom wanma.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "slow = {'torch', 'numpy', 'pydantic', 'rich', 'argcomplete', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.stderr, result.returncode) == ("", 0)


def test_help_costs_less_than_three_times_the_standard_modules_that_it_imports() -> None:
    """Both by turns, in processor time: a busy machine slows both. 0.15 s where the modules take 0.05 s."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    modules = "import argparse, dataclasses, json, pathlib, subprocess, tempfile, typing"
    taken = [(seconds("-m", "wanma", "--help"), seconds("-c", modules)) for _ in range(5)]
    shown, imported = map(min, zip(*taken, strict=True))
    assert shown < 3 * imported


def test_a_limit_of_open_files_is_no_bug_of_wanma(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from wanma.cli.main import main\n"
        "import wanma.cli.commands.train, wanma.api.run.job_run\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "sys.exit(main(['train', 'x.toml']))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, "ulimit -n" in ran.stderr, "bug" in ran.stderr) == (EXIT_FAILED, True, False)
