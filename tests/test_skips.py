"""On our CI a skipped test is a failure, except for the reasons that are allowed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = {
    "gpu": "import pytest\ndef test_it(): pytest.skip('needs a GPU')\n",
    "module": "import pytest\npytest.importorskip('no_such_package')\ndef test_it(): pass\n",
    "condition": "import pytest\n@pytest.mark.skipif(True, reason='no chromium')\ndef test_it(): pass\n",
    "expected failure": "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False\n",
}
OTHER_SKIPS = [("module", "2"), ("condition", "0"), ("condition", "2")]


def run(folder: Path, source: str, *options: str) -> tuple[int, str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    settings = f"[pytest]\npythonpath = {Path(__file__).parent}\nmarkers =\n  gpu\n  root\n"
    (folder / "pytest.ini").write_text(settings)
    (folder / "test_one.py").write_text(source + "def test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("module", "0"),
        ("condition", "1"),
        *(pytest.param(*one, marks=pytest.mark.full) for one in OTHER_SKIPS),
    ],
)
def test_a_skip_for_another_reason_fails_the_run_and_is_named(
    tmp_path: Path, name: str, workers: str
) -> None:
    code, text = run(tmp_path, SKIPPING[name], "--no-skips-except=gpu", "-n", workers)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "skips that count as failures here" in text
    assert "no_such_package" in text or "no chromium" in text


@pytest.mark.parametrize("name", ["gpu", "expected failure"])
def test_an_allowed_skip_and_an_expected_failure_do_not(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, SKIPPING[name], "--no-skips-except=gpu")[0] == 0


def test_without_the_option_skips_are_free(tmp_path: Path) -> None:
    assert run(tmp_path, SKIPPING["condition"])[0] == 0
