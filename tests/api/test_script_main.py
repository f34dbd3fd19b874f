"""Program that runs a script of JAX in an interpreter without wanma."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wanma.api.launch import script_main

SCRIPT = """\
import atexit, os, sys
import sibling
atexit.register(print, "atexit")
print(__name__, sys.argv[1:], sys.path[0], sibling.NUMBER)
"""


def run(folder: Path, last_line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script, with a last line of the test's own, as the program does."""
    code = folder / "code"
    code.mkdir()
    (code / "sibling.py").write_text("NUMBER = 3\n")
    (code / "main.py").write_text(SCRIPT + last_line + "\n")
    place = code if "-m" in words else folder
    command = [sys.executable, script_main.__file__, *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [("code/main.py",), ("-m", "main")])
@pytest.mark.parametrize("last_line", ["", "sys.exit(0)"])
def test_a_script_runs_as_python_runs_it(tmp_path: Path, words: tuple[str, ...], last_line: str) -> None:
    ran = run(tmp_path, last_line, *words, "--lr", "1")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"__main__ ['--lr', '1'] {tmp_path / 'code'} 3\natexit\n"


@pytest.mark.parametrize("words", [("code/main.py",), ("-m", "main")])
@pytest.mark.parametrize(
    ("last_line", "code", "told"),
    [
        ("raise ValueError('no such column: prize')", 1, "ValueError: no such column: prize\n"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("sys.excepthook = lambda *_: print('hook', file=sys.stderr); 1 / 0", 1, "hook\n"),
    ],
)
def test_a_script_that_fails_ends_without_functions_of_atexit(
    tmp_path: Path, words: tuple[str, ...], last_line: str, code: int, told: str
) -> None:
    ran = run(tmp_path, last_line, *words)
    assert ran.returncode == code
    assert ran.stdout.endswith(" 3\n")
    if told.startswith("ValueError"):
        first, second, *rest = ran.stderr.splitlines(keepends=True)
        assert first == "Traceback (most recent call last):\n"
        assert second.rstrip().endswith('main.py", line 5, in <module>')
        assert rest[-1] == told
    else:
        assert ran.stderr == told
