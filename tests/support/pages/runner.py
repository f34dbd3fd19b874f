"""Run of a page: its files are written and its commands and code run, in order, in one folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

from support.command import share_compiled
from support.pages.blocks import REPOSITORY, Block, Command, Page
from support.pages.checks import words
from support.pages.output import mismatch
from wanma.cli.main import main

IN_PROCESS = (
    "plan",
    "job",
    "cluster",
    "runs",
    "show",
    "report",
    "completion",
    "version",
    "--help",
    "--version",
)
"""Commands of wanma that start no ranks and leave no state in their process: they run in the test's own."""
COLUMNS = 120
"""Width of the terminal that the pages show."""
TIMEOUT_SECONDS = 240

_PYTHON = """
import json, os, sys, traceback
done = os.fdopen(int(sys.argv.pop()), "w", buffering=1)
os.set_inheritable(done.fileno(), False)
def _blocks():
    for line in sys.stdin.buffer:
        yield json.loads(line)
for _name, _source in _blocks():
    try:
        exec(compile(_source, _name, "exec"), globals())
    except BaseException:
        traceback.print_exc()
        print("failed", file=done)
        break
    print("done", file=done)
"""
"""Program that executes blocks of code in one namespace, that of `__main__`, as they come."""


class BlockError(AssertionError):
    """A command or code of a page that does not do what the page shows."""


@dataclass
class Ran:
    """A command that was run, with what it printed."""

    command: Command
    printed: str


def runs_in_process(page: Page) -> bool:
    """Say whether every block of the page runs in the test's own process, within a second or so."""
    return all(
        block.language == "console" and all(map(_is_in_process, _command_texts(block)))
        for block in page.blocks_to_run()
    )


def run_page(page: Page, scratch: Scratch) -> None:
    """Run all blocks of the page in the scratch folder, which keeps what each command printed.

    Raises:
        BlockError: another exit code or another output than the page shows, or code that raises.
    """
    with scratch:
        for block in page.blocks:
            if block.title:
                scratch.write(block)
            elif block.reason_not_run:
                continue
            elif block.language == "console":
                scratch.run_commands(block)
            elif block.language == "python":
                scratch.run_code(block, page.path)


@dataclass
class Scratch:
    """Folder of one page with the examples of the repository, and the processes started there."""

    folder: Path
    ran: list[Ran] = field(default_factory=list)

    def __enter__(self) -> Scratch:
        state = self.folder.with_name(f"{self.folder.name}.state")
        self.folder.mkdir(parents=True)
        shutil.copytree(
            REPOSITORY / "examples", self.folder / "examples", ignore=shutil.ignore_patterns("__pycache__")
        )
        share_compiled(state / "cache")
        self._directory = self.folder
        self._background: list[tuple[str, Command, subprocess.Popen[str]]] = []
        self._code: CodeProcess | None = None
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "COLUMNS": str(COLUMNS),
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(REPOSITORY / "src"),
            "XDG_CACHE_HOME": str(state / "cache"),
            "XDG_STATE_HOME": str(state),
        }
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._wait_for_background()
        finally:
            for _place, _command, process in self._background:
                _kill(process)
            if self._code is not None:
                self._code.close()

    def write(self, block: Block) -> None:
        """Write the block's file."""
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")

    def run_commands(self, block: Block) -> None:
        commands = block.commands()
        for command in commands:
            place = f"{block.page}:{command.line}"
            expected = block.exit_code if command is commands[-1] else 0
            text = f"{command.text.partition(' #')[0]} {block.arguments}" if block.arguments else command.text
            code, printed = self._run(text, command, place)
            self.ran.append(Ran(command, printed))
            _check(command, place, code, expected, printed)

    def run_code(self, block: Block, path: Path) -> None:
        if self._code is None:
            self._code = CodeProcess(self._directory, self._environment)
        self._code.execute(block, path)

    def _run(self, text: str, command: Command, place: str) -> tuple[int, str]:
        """Run one command line; return its exit code and what it printed, errors included."""
        if text.endswith("&") and not text.endswith("&&"):
            program = ["bash", "-o", "pipefail", "-c", text[:-1]]
            self._background.append((place, command, self._start(program, self._environment)))
            return 0, ""
        parts = words(text)
        if parts is None:
            return self._finish(self._start(["bash", "-o", "pipefail", "-c", text], self._environment), text)
        if parts[0] == "wait":
            self._wait_for_background()
            return 0, ""
        if parts[0] == "cd":
            self._directory = self._directory / parts[1]
            return 0, ""
        if parts[0] == "export":
            self._environment |= dict(part.split("=", 1) for part in parts[1:])
            return 0, ""
        settings = {}
        while re.fullmatch(r"\w+=.*", parts[0]):
            name, _, value = parts.pop(0).partition("=")
            settings[name] = value
        environment = self._environment | settings
        if _is_wanma_in_process(parts):
            return self._run_in_process(parts[1:], environment)
        if parts[0] == "wanma":
            parts = [sys.executable, "-m", "wanma", *parts[1:]]
        return self._finish(self._start(parts, environment), text)

    def _run_in_process(self, arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
        printed = io.StringIO()
        with (
            contextlib.chdir(self._directory),
            patch.dict(os.environ, environment, clear=True),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            try:
                code = main(arguments)
            except SystemExit as end:  # argparse, after --help
                code = int(end.code or 0)
        return code, printed.getvalue()

    def _start(self, program: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            program,
            cwd=self._directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _finish(self, process: subprocess.Popen[str], text: str) -> tuple[int, str]:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            printed = error.output or ""
            raise BlockError(f"not ended after {TIMEOUT_SECONDS} s: $ {text}\n{printed}") from None
        finally:
            _kill(process)
        return process.returncode, printed

    def _wait_for_background(self) -> None:
        while self._background:
            place, command, process = self._background.pop(0)
            code, printed = self._finish(process, command.text)
            self.ran.append(Ran(command, printed))
            _check(command, place, code, 0, printed)


class CodeProcess:
    """Process of its own in which the Python blocks of a page run, one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._done, write = os.pipe()
        self._printed = folder.with_name(f"{folder.name}.printed")
        with self._printed.open("w") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PYTHON, str(write)],
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=printed,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=(write,),
                start_new_session=True,
            )
        os.close(write)

    def execute(self, block: Block, path: Path) -> None:
        """Execute the block; lines in tracebacks are those of the page."""
        assert self._process.stdin is not None
        source = "\n" * block.line + block.text
        self._process.stdin.write(json.dumps([str(path), source]) + "\n")
        self._process.stdin.flush()
        ready = wait([self._done], TIMEOUT_SECONDS)
        answer = os.read(self._done, 100).decode().strip() if ready else "not ended"
        if answer != "done":
            raise BlockError(f"{block.place}: {answer or 'the process ended'}\n{self._printed.read_text()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        _kill(self._process)
        os.close(self._done)


def _check(command: Command, place: str, code: int, expected: int, printed: str) -> None:
    wrong = f"exit code {code}, expected {expected}" if code != expected else None
    if wrong is None and command.output:
        wrong = mismatch(command.output, printed)
    if wrong:
        raise BlockError(f"{place}: {wrong}\n$ {command.text}\n{printed}")


def _kill(process: subprocess.Popen[str]) -> None:
    """End the process and all of its session that are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _command_texts(block: Block) -> Iterator[str]:
    return (command.text for command in block.commands())


def _is_in_process(text: str) -> bool:
    parts = words(text)
    if not parts:
        return False
    return parts[0] in ("export", "cd") or _is_wanma_in_process(parts)


def _is_wanma_in_process(parts: list[str]) -> bool:
    if parts[0] != "wanma" or "--save" in parts:
        return False
    return len(parts) == 1 or parts[1] in IN_PROCESS or "--dry-run" in parts or "--help" in parts
