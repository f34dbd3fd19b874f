"""Creation of environments: by real pip, from a folder of wheels, only when asked."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from support.wheels import make_wheel
from wanma.bench.environments.creation import hashed_requirements
from wanma.bench.environments.pinned_packages import Pin
from wanma.cli.main import main
from wanma.job.errors import WanmaError

SUITE = """\
[[contenders]]
name = "framework"
python_environment = "mine"
command = ["{python}", "-c", "import oats; print('wanma step loss', oats.VERSION)"]

[rule]
rounds = 1
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    make_wheel(tmp_path / "wheels", "oats", "1.5", ["hay"])
    make_wheel(tmp_path / "wheels", "hay", "2.0")
    return tmp_path / "wheels"


@pytest.fixture
def suite(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "suite"
    (folder / "environments").mkdir(parents=True)
    (folder / "own.toml").write_text(SUITE)
    write_pins(folder, wheels)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")  # a constraint there would be one more requirement
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return folder / "own.toml"


def write_pins(folder: Path, wheels: Path, names: tuple[str, ...] = ("hay", "oats")) -> None:
    lines = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        if name in names:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            lines += [f"{name}=={version}", f"    # sha256:{digest}"]
    (folder / "environments" / "mine.txt").write_text("\n".join([*lines, "straw==3  # optional", ""]))


def environment(suite: Path, *words: str) -> int:
    return main(["bench", "environment", str(suite), "--environments", "made", *words])


def test_an_environment_is_made_when_its_user_says_so(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert environment(suite) == 1
    printed = capsys.readouterr().out
    assert f"mine: missing    {Path('made/mine').absolute()}" in printed
    assert f"make it: wanma bench environment {suite.parent.resolve()}/environments/mine.txt" in printed
    assert not Path("made").exists(), "nothing is installed unasked"
    assert environment(suite, "--make") == 0
    assert "mine: ready" in capsys.readouterr().out
    assert environment(suite) == 0
    options = ["--foreign-limit", "1000", "--environments", "made"]
    assert main(["bench", "train", str(suite), *options]) == 0
    (result,) = Path("bench-results").glob("*-own")
    assert '"oats": "1.5"' in (result / "result.json").read_text()
    (result / "suite.json").rename("suite.json")
    stored = Path("suite.json").read_text()
    assert "{environments}/mine" in stored
    assert str(Path.cwd()) not in stored


@pytest.mark.full
def test_a_file_with_another_hash_is_refused_and_nothing_is_left(
    suite: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(wheels, "oats", "1.5", ["hay", "hay>=1"])  # the same version, other bytes
    assert environment(suite, "--make") == 1
    assert "pip cannot install the pins of" in capsys.readouterr().err
    assert not Path("made/mine").exists()


def test_a_package_without_a_pin_is_refused(
    suite: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pins(suite.parent, wheels, names=("oats",))
    assert environment(suite, "--make") == 2
    assert "hash of hay 2.0" in capsys.readouterr().err
    assert not Path("made/mine").exists()


def test_pins_without_hashes_are_all_that_is_installed(suite: Path) -> None:
    (suite.parent / "environments" / "mine.txt").write_text("oats==1.5\n")
    assert environment(suite, "--make") == 0
    packages = {file.name for file in Path("made/mine/lib").glob("python3*/site-packages/*.dist-info")}
    assert "oats-1.5.dist-info" in packages
    assert "hay-2.0.dist-info" not in packages, "a list leaves out on purpose"


def test_what_is_there_is_left_alone(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Path("made/mine/own.txt")
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    assert environment(suite, "--make") == 1
    assert "the environment 'mine' is missing" in capsys.readouterr().out
    assert own.read_text() == "mine"


def test_a_local_build_is_taken_as_its_index_has_it(tmp_path: Path) -> None:
    file = tmp_path / "torch.whl"
    file.write_bytes(b"a build")
    chosen = [{
        "metadata": {"name": "Torch", "version": "2.13.0+cpu"},
        "download_info": {"url": file.as_uri(), "archive_info": {}},
    }]  # fmt: skip
    lines: list[str] = []
    text = hashed_requirements(chosen, {"torch": Pin("2.13.0", ("0" * 64,))}, "pins.txt", lines.append)
    assert text == f"torch==2.13.0+cpu --hash=sha256:{hashlib.sha256(b'a build').hexdigest()}\n"
    assert lines == [
        "torch 2.13.0+cpu is a local build, without a hash in the pins: from a folder of this machine"
    ]
    with pytest.raises(WanmaError, match=r"hash of torch 2\.13\.0\+cpu"):
        hashed_requirements(chosen, {"hay": Pin("1")}, "pins.txt", lines.append)


def test_a_suite_without_environments_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "environment", "gpt"]) == 0
    assert "gpt need no Python environment" in capsys.readouterr().out
