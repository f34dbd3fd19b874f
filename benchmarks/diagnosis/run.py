"""Study of `wanma diagnose`: faults of which the first cause named must be the right one, and healthy runs.

python benchmarks/diagnosis/run.py                        # all, some 15 minutes; as root, with iproute2
python benchmarks/diagnosis/run.py --case "slow disk"     # some, whose rows are written anew
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common import RESULTS, commit, machine, table
from benchmarks.diagnosis.cases import FAULTS, HEALTHY, Case
from benchmarks.mixed.quota import held_back
from wanma.bench.programs.limited_link import command_over_link
from wanma.diagnosis.evidence import read_evidence
from wanma.diagnosis.finding import Finding
from wanma.diagnosis.findings import diagnose
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report

PAGE, DATA = RESULTS / "diagnosis.md", RESULTS / "diagnosis.json"
START, END = "<!-- cases -->\n", "<!-- end of cases -->\n"
FIRST_STEPS = 40
"""Steps of a run before its fault begins."""
QUOTA_PERCENT, LINK_MEGABITS, DISK_BYTES_A_SECOND = 25, 200.0, 2 << 20
FILE_BYTES = 1 << 28
JOIN_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
BLOCK_IO = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    case: str
    expected: str
    named: str
    """First finding; empty: there was none."""
    title: str
    is_right: bool
    alerts: tuple[str, ...]
    """Alerts that fired."""
    steps: int
    commit: str


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", help="name of a case; default: all")
    options = parser.parse_args()
    cases = [case for case in (*FAULTS, *HEALTHY) if not options.case or case.name in options.case]
    results = []
    for case in cases:
        results.append(run_case(case))
        print(json.dumps(asdict(results[-1])), flush=True)
    _record(results)
    return int(any(not result.is_right for result in results))


def _record(results: list[Result]) -> None:
    """Write results beside those recorded of other cases, and the page."""
    known = json.loads(DATA.read_text())["results"] if DATA.exists() else []
    by_case = {entry["case"]: entry for entry in [*known, *map(asdict, results)]}
    entries = [by_case[case.name] for case in (*FAULTS, *HEALTHY) if case.name in by_case]
    recorded = {"environment": f"{machine()}; {time.strftime('%Y-%m-%d')}", "results": entries}
    DATA.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{before}{START}{page_part(recorded)}{END}{rest.split(END)[1]}")


def run_case(case: Case) -> Result:
    """Run a case in a folder of its own, and diagnose it."""
    with tempfile.TemporaryDirectory(prefix="wanma-diagnosis-") as name:
        folder = Path(name)
        shutil.copy(Path(__file__).with_name("programs.py"), folder)
        if case.data == "Stored":
            (folder / "rows.bin").write_bytes(os.urandom(1 << 20) * (FILE_BYTES >> 20))
            subprocess.run(["sync"], check=True)
        run = RunDirectory(folder / "runs" / "case")
        with _training(case, folder, run) as process:
            _wait(lambda: _steps(run) >= FIRST_STEPS, process, 120)
            if case.strikes:
                (folder / "fault").touch()
            if case.trouble == "killed":
                os.killpg(process.pid, signal.SIGKILL)
                _kill_ranks(run)
            _wait(lambda: False, process, case.seconds)
            findings = _diagnose(run)
        if case.expected in ("hang", "failure", "not_finite", "crash"):
            findings = _diagnose(run)  # at its end
        return judge(case, findings, run)


def judge(case: Case, findings: list[Finding], run: RunDirectory) -> Result:
    events = read_report(run).events
    alerts = tuple(event["alert"] for event in events if event["kind"] == "alert" and event["is_firing"])
    if not case.expected:
        named = findings[0].name if findings else ""
        title = findings[0].title if findings else ""
        return Result(case.name, "", named, title, not findings and not alerts, alerts, _steps(run), commit())
    first = findings[0] if findings else Finding("", "slow", "", (), "")
    text = " ".join((first.title, *first.evidence, first.change))
    is_right = first.name == case.expected and all(word in text for word in case.words)
    return Result(case.name, case.expected, first.name, first.title, is_right, alerts, _steps(run), commit())


@contextmanager
def _training(case: Case, folder: Path, run: RunDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """Start the training of a case under its trouble; end it if it still runs at the end."""
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "WANMA_SECRET": secrets.token_hex(16)}
    wanma = [str(Path(sys.executable).with_name("wanma"))]
    (folder / "job.yaml").write_text(json.dumps(job_of(case)))
    command = [*wanma, "train", "job.yaml", "--run-dir", str(run.path)]
    if case.is_script:
        command = [*wanma, "launch", "--ranks", "2", "--run-dir", str(run.path), "programs.py"]
    with ExitStack() as stack:
        if case.trouble == "slow link":
            command = command_over_link(command, LINK_MEGABITS)
        elif case.trouble == "cpu quota":
            stack.enter_context(held_back(run, 1, QUOTA_PERCENT, after_step=FIRST_STEPS))
        elif case.trouble == "slow disk":
            command = ["sh", "-c", JOIN_GROUP, str(_slow_disk(stack)), *command]
        log = stack.enter_context((folder / "output.log").open("wb"))
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def job_of(case: Case) -> dict[str, Any]:
    """Return the job of a case."""
    job: dict[str, dict[str, Any]] = {
        "model": {"factory": "programs:model", "arguments": dict(case.model)},
        "data": {"factory": f"programs:{case.data}", "validation_fraction": 0.0, "workers": 1},
        "train": {"steps": 100_000, "global_batch": 64, "warmup_steps": 0},
        "parallel": {"dp_replicate": 2},
        "checkpoint": {"every_steps": 1000},
        "observe": {"console": "quiet", "name": "case"},
    }
    for section, values in case.job.items():
        job.setdefault(section, {}).update(values)
    return job


def _slow_disk(stack: ExitStack) -> Path:
    """Return a control group whose reads from the disk below this folder are slow."""
    group = BLOCK_IO / f"wanma-diagnosis-{os.getpid()}"
    group.mkdir()
    stack.callback(_remove_group, group)
    device = Path(tempfile.gettempdir()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (group / "blkio.throttle.read_bps_device").write_text(f"{number} {DISK_BYTES_A_SECOND}")
    return group


def _remove_group(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def _kill_ranks(run: RunDirectory) -> None:
    for rank in range(2):
        text = run.rank_log(rank).read_text(errors="replace")
        process = int(text.split("process ", 1)[1].split()[0].rstrip(",:)"))
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _steps(run: RunDirectory) -> int:
    try:
        return run.metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a condition holds, the process has ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition() and process.poll() is None:
        time.sleep(0.1)


def _diagnose(run: RunDirectory) -> list[Finding]:
    return [finding for finding in diagnose(read_evidence(read_report(run))) if finding.name != "interrupted"]


def page_part(recorded: Mapping[str, Any]) -> str:
    """Return the part of the page that a recorded study makes."""
    results = [Result(**entry) for entry in recorded["results"]]
    rows = [
        (
            result.case,
            result.expected or "none",
            result.named or "none",
            "yes" if result.is_right else "no",
            ", ".join(dict.fromkeys(result.alerts)) or "–",
        )
        for result in results
    ]
    commits = ", ".join(dict.fromkeys(result.commit for result in results))
    faults = [result for result in results if result.expected]
    healthy = [result for result in results if not result.expected]
    told = sum(result.is_right for result in faults)
    quiet = sum(result.is_right for result in healthy)
    return (
        f"\nOf {len(faults)} faults {told} have their cause named first; of {len(healthy)} healthy runs "
        f"{quiet} have no finding and no alert. {recorded['environment']}; wanma at {commits}.\n\n"
        f"{table(('run', 'cause', 'first named', 'right', 'alerts'), rows)}\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
