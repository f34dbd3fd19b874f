"""The tests as continuous integration runs them: all at once, then the failures alone, then a verdict.

    python -m support.gate --at-once 3 [--share 0.1] [--started SECONDS] [--since REVISION] [WORDS for pytest]

Of the cases that only the full suite has, a share runs that follows from the commit. Some 40 minutes after
the start none of them is started any more, and after 65 no test at all: what was not run is named. In
build/ci are the records test by test, the whole log, junit.xml and the verdict.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from support.gate import scratch
from support.gate.machine import busy_seconds
from support.gate.records import Record, read_records
from support.gate.verdict import (
    MOST_REPEATED,
    Failure,
    Verdict,
    reason_against_repeat,
    unwelcome_skips,
)

FULL_MINUTES = 40.0
LAST_MINUTES = 65.0
"""Minutes after the start until which cases of the full suite, and tests of every day, are started."""
SHARE = 0.1
ALLOWED_SKIP = "--no-skips-except="
REPEATS = 2
REPEAT_SECONDS = 600.0
"""For all repeats together."""
_END_SECONDS = 400.0
"""Longer than the limit of one test (pyproject.toml): a run that has not ended by then hangs."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m support.gate", description=__doc__, allow_abbrev=False)
    parser.add_argument("--at-once", default="3", help="processes that run test files")
    parser.add_argument(
        "--share", type=float, default=SHARE, help="of the cases that only the full suite has"
    )
    parser.add_argument("--started", type=float, default=time.time(), help="seconds since 1970")
    parser.add_argument(
        "--since",
        metavar="REVISION",
        help="run the pure tests and those that a change since it touches; what the time leaves out is named",
    )
    parser.add_argument("--evidence", type=Path, default=Path("build/ci"))
    parser.add_argument("--full-minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--last-minutes", type=float, default=LAST_MINUTES)
    options, rest = parser.parse_known_args(words)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):  # a shell ignores them in the background
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if options.since:
        rest += [f"--changed-since={options.since}", "--and-pure"]
    until = options.started + 60 * options.last_minutes
    gate = Gate(options.evidence.absolute(), _commit(), until, is_part=bool(options.since))
    code = gate.run_all(
        [
            *("-n", options.at_once, "--full"),
            # With `=`: before pytest reads tests/conftest.py, which has these, a word alone is a path.
            *(f"--share={options.share}", f"--draw={gate.commit}", f"--records={gate.evidence}"),
            *(f"--full-until={options.started + 60 * options.full_minutes}", f"--until={gate.until}"),
            *(f"--junitxml={gate.evidence / 'junit.xml'}", *rest),
        ]
    )
    return gate.close(gate.judge(code, [word for word in rest if word.startswith(ALLOWED_SKIP)]))


class Gate:
    """One run.

    Args:
        evidence: folder for what the run leaves.
        until: seconds since 1970 after which nothing is started.
        is_part: the run may end before all tests have run.
    """

    def __init__(self, evidence: Path, commit: str, until: float, is_part: bool = False) -> None:
        self.evidence, self.commit, self.until, self._is_part = evidence, commit, until, is_part
        self._load = os.getloadavg()[0]
        self._started, self._busy = time.monotonic(), busy_seconds()
        self._folders: list[Path] = []
        shutil.rmtree(evidence / "alone", ignore_errors=True)
        evidence.mkdir(parents=True, exist_ok=True)

    def run_all(self, words: Sequence[str]) -> int:
        """Run pytest over all tests, its output copied to the log; return its exit code."""
        with (self.evidence / "log").open("wb") as log:

            def copy(chunk: bytes) -> None:
                log.write(chunk)
                log.flush()
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()

            return self._pytest(words, copy, self.until + _END_SECONDS - time.time())

    def judge(self, code: int, words: Sequence[str]) -> Verdict:
        """Repeat the failures alone, and decide.

        Args:
            code: of the run of all tests.
            words: options that allow skips, for the repeats too.
        """
        records = read_records(self.evidence)
        failed = [one for one in records if one.outcome == "failed"]
        left_out = [one.test for one in records if one.outcome in ("left out", "not started")]
        is_too_many = len(failed) > MOST_REPEATED
        deadline = time.monotonic() + REPEAT_SECONDS
        failures = []
        for one in failed:
            why = reason_against_repeat(one, Path.cwd())
            if why:
                why = f"never repeated: {why}"
            elif is_too_many:
                why = f"not repeated: more than {MOST_REPEATED} tests failed"
            else:
                why = self._repeat(one, words, deadline)
            failures.append(Failure(one, why))
        reasons = []
        if code not in (0, 1):
            reasons.append(f"the tests did not run to their end (exit code {code})")
        if skips := unwelcome_skips(records, [word.removeprefix(ALLOWED_SKIP) for word in words]):
            reasons += [f"skipped: {one.test}: {one.cause}"[:240] for one in skips]
        elif code == 1 and not failed:
            reasons.append("the tests failed, and no test did: see the log")
        if not self._is_part and any(one.outcome == "not started" for one in records):
            reasons.append("the time was over before the tests of every day had run")
        if all(one.outcome not in ("passed", "failed") for one in records):
            reasons.append("no test ran")
        return Verdict(
            passed=sum(one.outcome == "passed" for one in records),
            skipped=sum(one.outcome == "skipped" for one in records),
            broken=[one for one in failures if one.why],
            flaky=[one for one in failures if not one.why],
            left_out=left_out,
            reasons=reasons,
        )

    def close(self, verdict: Verdict) -> int:
        """Print and keep the verdict; return the exit code."""
        minutes = (time.monotonic() - self._started) / 60
        took = f"{minutes:.1f} minutes, {busy_seconds() - self._busy:.0f} CPU-seconds of this machine"
        lines = [f"tests of {self.commit}: {took}, load before {self._load:.2f}", *verdict.lines()]
        text = "\n".join(lines) + "\n"
        (self.evidence / "verdict").write_text(text)
        run = f"| {date.today().isoformat()} | {self.commit} | {self._load:.2f}"
        rows = [f"{run} | {one.record.test} | {_cell(one.record.cause)} |\n" for one in verdict.flaky]
        (self.evidence / "flaky.md").write_text("".join(rows))
        print(f"\n== verdict\n{text}", end="", flush=True)
        if verdict.is_green:
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
        return 0 if verdict.is_green else 1

    def _repeat(self, record: Record, words: Sequence[str], deadline: float) -> str:
        """Run the test alone, twice at most; return "" once it passes, else why it counts as broken."""
        for number in range(1, REPEATS + 1):
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                return "not repeated: the time for repeats was over"
            print(f"alone, {number}: {record.test}", flush=True)
            log = self.evidence / "alone" / f"{record.test.replace('/', '.')[:180]}.{number}.log"
            log.parent.mkdir(exist_ok=True)
            with log.open("wb") as file:
                options = ("-n", "0", "-q", "-p", "no:cacheprovider", "--full")
                if self._pytest([*options, *words, record.test], file.write, seconds) == 0:
                    return ""
        return f"fails alone, {REPEATS} times"

    def _pytest(self, words: Sequence[str], write: Callable[[bytes], object], seconds: float) -> int:
        """Run pytest in a folder and an environment of its own, and end what it leaves behind."""
        folder = scratch.new_folder()
        self._folders.append(folder)
        environment = scratch.environment(folder)
        environment.pop("PYTHONPATH", None)  # with which this module was found
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", f"--basetemp={folder / 'p'}", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        deadline = time.monotonic() + seconds
        is_over = False
        while process.poll() is None:
            write(process.stdout.read() or b"")
            if time.monotonic() > deadline and not is_over:
                is_over = True
                write(f"\nended after {seconds:.0f} s\n".encode())
                process.kill()
            time.sleep(0.1)
        write(process.stdout.read() or b"")
        for line in scratch.end_processes_of(folder):
            write(f"ended: {line}\n".encode())
        return process.returncode


def _commit() -> str:
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:160]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
