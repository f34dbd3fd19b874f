"""`wanma init`: examples for whoever has no clone."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from wanma.cli.installation.init import _runnable
from wanma.cli.main import main
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, JobError
from wanma.job.examples import list_examples
from wanma.job.file.loading import load_job

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = [example.name for example in list_examples()]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_examples_of_the_repository_are_listed_with_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init"]) == 0
    words = capsys.readouterr().out.split()
    assert [path.stem for path in FOLDER.glob("*.*") if path.stem not in words] == []
    assert all(example.summary and example.commands for example in list_examples())


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_written_with_commands_for_its_new_folder(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name]) == 0
    written, *said = capsys.readouterr().out.splitlines()
    file = Path(written.removeprefix("wrote "))
    original, text = (FOLDER / file).read_text(), file.read_text()
    assert text == original.replace("examples/", "")
    assert file.name in said[-1]
    assert said[-1].startswith("next:  ")
    if file.suffix == ".toml":
        assert said[-1].startswith((f"next:  wanma train {file}", f"next:  wanma plan {file}"))
        assert tomllib.loads(text) == tomllib.loads(original)
        load_job(file)


def test_only_examples_with_data_of_others_need_a_download() -> None:
    needy = [example for example in list_examples() if example.needs_data]
    assert [example.name for example in needy] == ["cifar-convnet", "criteo", "mnist", "resnet"]
    for example in list_examples():
        if example.file.suffix == ".toml":
            job = load_job(example.file)
            is_criteo = any("criteo" in entry for entry in job.data.path)
            assert (bool(job.data.images) or is_criteo) == example.needs_data


def test_an_example_that_needs_another_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "use_model.py"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["wrote use_model.py", "needs: wanma init gpt", "next:  wanma train gpt.toml"]
    assert said[3].endswith("use_model.py runs/gpt")


def test_an_unknown_name_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "gtp"]) == EXIT_USAGE
    assert capsys.readouterr().err == (
        "error: there is no example 'gtp'. Did you mean 'gpt'?\n  see all with `wanma init`\n"
    )


def test_an_existing_file_is_never_changed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("gpt.toml").write_text("mine")
    assert main(["init", "gpt"]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: gpt.toml exists and is not changed\n")
    assert Path("gpt.toml").read_text() == "mine"


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    Path("gpt.toml").symlink_to(tmp_path / "elsewhere.toml")
    assert main(["init", "gpt"]) == EXIT_USAGE
    assert not (tmp_path / "elsewhere.toml").exists()


def test_a_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/sys")  # nobody may write there, not even root
    assert main(["init", "gpt"]) == EXIT_FAILED
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: cannot write /sys/gpt.toml: ")
    assert hint == "  run in a folder that you may write to"


def test_a_file_that_has_no_room_is_removed() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    code = f"{limit}; from wanma.cli.main import main; raise SystemExit(main(['init', 'gpt']))"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert failed.returncode == EXIT_FAILED
    assert failed.stderr.startswith("error: cannot write ")
    assert not Path("gpt.toml").exists()


def test_an_installation_without_examples_says_so(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="has no examples"):
        list_examples([tmp_path / "none"])


def test_a_python_that_is_not_the_shell_s_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of pipx and `uv tool`, which put only the command `wanma` on the path."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _runnable("python custom_model.py") == f"{sys.executable} custom_model.py"
    assert _runnable("wanma train gpt.toml") == "wanma train gpt.toml"
    monkeypatch.setattr(sys, "executable", str(python))
    assert _runnable("python custom_model.py") == "python custom_model.py"


def test_python_dash_m_wanma_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wanma", "init", "gpt"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "wrote gpt.toml\nnext:  wanma train gpt.toml\n"
