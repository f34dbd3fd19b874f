"""TAB: what a shell gets back, through the protocol that it speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wanma.cli.main import main


def offered(line: str, folder: Path) -> list[str]:
    """Words that bash offers with the cursor at the end of `line`."""
    answer = folder / ".answer"
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    program = "from wanma.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=folder, check=True, timeout=60)
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("gpt.toml", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("gpt", "gpt-2", "resnet"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.toml").touch()
    return tmp_path


def test_names_of_examples_are_offered(folder: Path) -> None:
    assert offered("wanma init gp", folder) == ["gpt"]


def test_commands_are_completed(folder: Path) -> None:
    assert offered("wanma rep", folder) == ["report"]
    assert set(offered("wanma ", folder)) >= {"train", "show", "doctor"}


def test_job_files_are_completed_and_other_files_are_not(folder: Path) -> None:
    assert offered("wanma train g", folder) == ["gpt.toml"]
    assert offered("wanma train n", folder) == [""]


def test_keys_of_the_job_file_are_completed(folder: Path) -> None:
    assert offered("wanma train gpt.toml train.ste", folder) == ["train.steps="]
    assert set(offered("wanma train gpt.toml train.steps=4 parallel.dp", folder)) == {
        "parallel.dp_replicate=",
        "parallel.dp_shard=",
    }


def test_the_values_of_an_enumeration_are_completed(folder: Path) -> None:
    assert offered("wanma train gpt.toml train.precision=b", folder) == ["train.precision=bf16"]
    assert set(offered("wanma train gpt.toml train.deterministic=", folder)) == {
        "train.deterministic=false",
        "train.deterministic=true",
    }
    assert offered("wanma train gpt.toml train.steps=", folder) == [""]


def test_runs_are_completed_by_name_where_the_command_would_look(folder: Path) -> None:
    assert set(offered("wanma show gpt", folder)) == {"gpt", "gpt-2"}
    assert offered("wanma report --runs elsewhere g", folder) == [""]


def test_actions_and_places_of_checkpoints_are_completed(folder: Path) -> None:
    (folder / "saved").mkdir()
    assert offered("wanma checkpoint ve", folder) == ["verify"]
    assert set(offered("wanma checkpoint diff gpt", folder)) == {"gpt", "gpt-2"}
    assert offered("wanma checkpoint list sa", folder) == ["saved/"]


def test_the_line_for_the_shell_loads_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert main(["completion"]) == 0
    assert capsys.readouterr().out == 'eval "$(wanma completion zsh --code)"\n'
    assert main(["completion", "fish"]) == 0
    assert capsys.readouterr().out == "wanma completion fish --code | source\n"
    assert main(["completion", "bash", "--code"]) == 0
    assert "complete -o nospace" in capsys.readouterr().out


def test_the_code_works_in_a_real_bash(folder: Path) -> None:
    """Loads it, asks for `wanma show gp<TAB>` the way bash does, and reads the reply."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = (
        'eval "$(wanma completion bash --code)"\n'
        'COMP_LINE="wanma show gp"; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9\n'
        "COMP_WORDS=(wanma show gp); COMP_CWORD=2\n"
        "_python_argcomplete_wanma wanma 2>/dev/null || _python_argcomplete wanma\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    result = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert sorted(result.stdout.split()) == ["gpt", "gpt-2"]
