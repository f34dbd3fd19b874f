"""The Containerfile: carried out on a plain Debian, it gives an image that trains as its own user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import wanma
from support.containerfile import Build, debian_root, instructions, is_sent

REPOSITORY = Path(__file__).parents[1]
CONTAINERFILE = REPOSITORY / "Containerfile"
OWN_FOLDERS = ("/opt/", "/home/", "/root/")
"""Places that a plain Debian has not."""
JOB = """
[model]
preset = "gpt-1m"
[data]
text = ["stdlib"]
sequence_length = 32
[train]
steps = 3
global_batch = 2
"""


def pip_settings() -> tuple[dict[str, str], list[str]]:
    """Return environment variables of pip here, and the folders that its settings name."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    listed = _pip("config", "list")
    words = [_pip("cache", "dir").strip(), *re.findall(r"(?:file://)?(/[^\s'\"]+)", listed)]
    folders = [word for word in words if word.startswith(OWN_FOLDERS) and Path(word).is_dir()]
    if certificates := re.search(r"cert='([^']+)'", listed):
        variables["PIP_CERT"] = certificates[1]
    return variables, sorted(set(folders))


def _pip(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=True
    ).stdout


def test_an_instruction_may_take_several_lines() -> None:
    text = "# why\nRUN a \\\n # in between\n && b\nenv X=1\n"
    assert list(instructions(text)) == [("RUN", "a   && b"), ("ENV", "X=1")]


def test_the_builder_gets_what_is_copied_and_nothing_else() -> None:
    for name, rest in instructions(CONTAINERFILE.read_text()):
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (REPOSITORY / source).exists()
                assert is_sent(source, REPOSITORY)
    for path in (".git", ".venv", "runs", "tests/support/ssh.py", "src/wanma/__pycache__"):
        assert not is_sent(path, REPOSITORY)


@pytest.mark.root
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_image_is_built_and_trains_as_its_user(tmp_path: Path) -> None:
    variables, folders = pip_settings()
    variables["PIP_NO_COMPILE"] = "1"  # half of the time of an installation
    root = debian_root(tmp_path, folders)
    if "PIP_CERT" in variables:  # the steps renew the system's own
        shutil.copy(variables["PIP_CERT"], root.path / "run" / "certificates.crt")
        variables["PIP_CERT"] = "/run/certificates.crt"
    build = Build(root, REPOSITORY, {"EXTRAS": "yaml"}, variables)
    build.run(CONTAINERFILE.read_text())
    assert (build.base, build.user) == ("docker.io/library/python:3.11-slim-bookworm", "wanma")
    version = build.start(["--version"])
    assert version.stdout.split() == ["wanma", wanma.__version__], version.stdout
    assert build.start().stdout.startswith("usage: wanma"), build.start().stdout
    place = build.shell(
        "id -un && pwd && command -v python3 && python3 -c 'import yaml, wanma; print(wanma.__file__)'"
    )
    user, folder, python, package = place.stdout.split()
    assert (user, folder, python) == ("wanma", "/work", "/opt/wanma/bin/python3")
    assert package.startswith("/opt/wanma/lib/")
    assert build.shell("touch /opt/wanma/x").returncode != 0
    build.root.path.joinpath("work", "job.toml").write_text(JOB)
    trained = build.start(["train", "job.toml", "observe.console=plain", "observe.name=three"])
    assert trained.returncode == 0, trained.stdout[-3000:]
    assert "step 3/3" in trained.stdout
    report = build.root.path / "work" / "runs" / "three" / "report.html"
    assert report.stat().st_uid == 1000
    shutil.rmtree(root.path)  # a gigabyte, which pytest would keep
