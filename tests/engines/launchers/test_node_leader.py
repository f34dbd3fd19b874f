"""One process of a node leads the others: exit codes, deaths, signals and resources, with real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from support import launcher_environments as of
from wanma.engines.launchers import node_leader
from wanma.engines.launchers.node_leader import mark_output_as_forwarded, run_on_node
from wanma.engines.launchers.placement import read_placement
from wanma.job.errors import WanmaError

PROGRAM = """
import json, os, sys, time
from wanma.elastic.supervisor.stop_signals import SIGNAL_REPEAT_SECONDS, ReceivedSignals
from wanma.engines.launchers import node_leader
from wanma.engines.launchers.placement import read_placement
from wanma.job.errors import WanmaError

node_leader.MEETING_SECONDS = float(os.environ.pop("TEST_MEETING_SECONDS", "60"))
if seconds := os.environ.pop("TEST_REPEAT_SECONDS", ""):
    for number in SIGNAL_REPEAT_SECONDS:
        SIGNAL_REPEAT_SECONDS[number] = float(seconds)
if user := os.environ.pop("TEST_USER", ""):
    os.setuid(int(user))
if cores := os.environ.pop("TEST_CORES", ""):
    os.sched_setaffinity(0, json.loads(cores))

class ReportedSignals(ReceivedSignals):  # with a line of output for each that has been handled
    def is_repeat(self, number):
        if repeats := super().is_repeat(number):
            os.write(1, b"repeated\\n")
        return repeats

    def add(self, number):
        is_second = super().add(number)
        os.write(1, b"received\\n")
        return is_second

node_leader.ReceivedSignals = ReportedSignals

def command():
    if sys.argv[1] == "child" and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print(json.dumps(["leads", sorted(os.sched_getaffinity(0)), dict(os.environ)]), flush=True)
    if sys.argv[1] == "error":
        raise WanmaError("wrong", exit_code=3)
    if sys.argv[1] in ("wait", "child"):
        sys.stdin.read()
    return int(sys.argv[2])

placement = read_placement()
print(json.dumps(["starts", placement.local_rank]), flush=True)
try:
    code = node_leader.run_on_node(placement, command)
except WanmaError as error:
    print(f"error: {error.message}", file=sys.stderr)
    code = error.exit_code
print(json.dumps(["ends", "torch" in sys.modules]), flush=True)
sys.exit(code)
"""


class Launch:
    """Processes of one launch on this node."""

    def __init__(
        self, *arguments: str, size: int = 3, ranks: tuple[int, ...] | None = None, **more: str
    ) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *arguments],
                env={
                    **os.environ,
                    **of.open_mpi(rank, size=size, local_size=size, PMIX_NAMESPACE=f"test-{os.getpid()}"),
                    **{name: text.replace("RANK", f"{rank}") for name, text in more.items()},
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (range(size) if ranks is None else ranks)
        ]

    def until_led(self) -> list[object]:
        """Wait until all have met; return what the leader tells."""
        led: list[object] = []
        for process in self.processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())[0] == "starts"
        stdout = self.processes[0].stdout
        assert stdout is not None
        led = json.loads(stdout.readline())
        assert led[0] == "leads"
        return led

    def end(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each."""
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=60)
            ended.append((process.returncode, out, err))
        return ended


@contextmanager
def launched(*arguments: str, **options: object) -> Iterator[Launch]:
    launch = Launch(*arguments, **options)  # type: ignore[arg-type]  # passed on as given
    try:
        yield launch
    finally:
        for process in launch.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("arguments", "code"), [(("return", "0"), 0), (("return", "7"), 7), (("error", "0"), 3)]
)
def test_all_exit_with_the_code_of_the_leader_and_only_it_says_anything(
    arguments: tuple[str, ...], code: int
) -> None:
    with launched(*arguments) as launch:
        ended = launch.end()
    assert [one[0] for one in ended] == [code] * 3
    assert [out.count("leads") for _, out, _ in ended] == [1, 0, 0]
    assert [err for _, _, err in ended[1:]] == ["", ""]
    assert all('["ends", false]' in out for _, out, _ in ended), "none imports torch"


@pytest.mark.parametrize("does", ["wait", "child"])
def test_when_the_leader_is_killed_the_others_say_so_and_end(does: str) -> None:
    """Even if a child of the leader still holds its connections."""
    with launched(does, "0") as launch:
        launch.until_led()
        children = psutil.Process(launch.processes[0].pid).children()
        launch.processes[0].kill()
        ended = (
            launch.end() if does == "wait" else [(-9, "", ""), *(_end(one) for one in launch.processes[1:])]
        )
        for child in children:
            child.kill()
    assert [code for code, _, _ in ended] == [-9, 1, 1]
    for _, _, err in ended[1:]:
        assert err.count("\n") == 1
        assert f"local rank 0 (pid {launch.processes[0].pid})" in err


def _end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def send(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal to a process that waits; return what it says of it when it has handled it."""
    process.send_signal(number)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_who_waits_ignores_the_first_signal_of_each_kind() -> None:
    with launched("wait", "143", TEST_REPEAT_SECONDS="600") as launch:
        launch.until_led()
        _, first, second = launch.processes
        for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            assert send(first, number) == send(second, number) == "received"
        assert send(second, signal.SIGTERM) == "repeated"  # to the group and to the process: one request
        ended = launch.end()
    assert [code for code, _, _ in ended] == [143] * 3


def test_a_second_interrupt_ends_who_waits() -> None:
    with launched("wait", "0", TEST_REPEAT_SECONDS="0") as launch:
        launch.until_led()
        waiting = launch.processes[1]
        assert send(waiting, signal.SIGINT) == "received"
        assert waiting.poll() is None
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(60) == 130
        assert launch.processes[2].poll() is None


def test_the_leader_has_the_cores_and_devices_of_all_and_no_variables_of_one() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    options = {
        "TEST_CORES": f"[{cores[0]}]",
        "CUDA_VISIBLE_DEVICES": "RANK",
        "OMPI_MCA_hwloc_base_binding_policy": "core",
    }
    with launched("return", "0", **options) as launch:
        _, alone, environment = json.loads(launch.end()[0][1].splitlines()[1])
    assert alone == cores[:1], "bound on request"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert not [name for name in environment if name.startswith(("OMPI_", "PMIX_"))]
    del options["OMPI_MCA_hwloc_base_binding_policy"]
    with launched("return", "0", **options) as launch:
        _, free, _ = json.loads(launch.end()[0][1].splitlines()[1])
    assert free == sorted(range(os.cpu_count() or 1)), "bound by mpirun unasked"


def test_a_process_that_does_not_come_is_named() -> None:
    with launched("return", "0", ranks=(0, 2), TEST_MEETING_SECONDS="2") as launch:
        (code, _, told), (other, _, died) = launch.end()
    assert (code, other) == (1, 1)
    assert "mpirun started 3 processes on this node, and after 2 s local rank 1 is missing" in told
    assert "has died" in died
    with launched("return", "0", ranks=(2,), TEST_MEETING_SECONDS="1") as launch:
        ((code, _, told),) = launch.end()
    assert code == 1
    assert "local rank 2 of mpirun finds no process with local rank 0 on this node: none has come" in told


def test_a_shell_may_run_one_command_after_the_other_in_all_processes() -> None:
    for code in ("0", "5"):
        with launched("return", code) as launch:
            assert [one[0] for one in launch.end()] == [int(code)] * 3


@pytest.mark.root
def test_another_user_s_processes_of_the_same_name_are_not_met() -> None:
    with launched("wait", "4", TEST_USER="65534") as other, launched("wait", "6") as own:
        other.until_led()
        own.until_led()
        assert [code for code, _, _ in own.end()] == [6] * 3
        assert [code for code, _, _ in other.end()] == [4] * 3


@pytest.mark.root
def test_a_name_that_another_user_has_taken_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    placements = [read_placement(of.open_mpi(rank, size=2, local_size=2)) for rank in (0, 1)]
    assert placements[0] is not None
    name = node_leader._socket_name(placements[0])
    taker = os.fork()
    if taker == 0:
        os.setuid(65534)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(name)
        sock.listen()
        signal.pause()
    try:
        while name.encode()[1:] not in Path("/proc/net/unix").read_bytes():
            time.sleep(0.01)
        monkeypatch.setattr(node_leader, "MEETING_SECONDS", 0.5)
        with pytest.raises(
            WanmaError, match="already leads the processes of this mpirun: Address already in use"
        ):
            run_on_node(placements[0], lambda: 0)
        with pytest.raises(WanmaError, match=f"process {taker} of another user has its place"):
            run_on_node(placements[1], lambda: 0)
    finally:
        os.kill(taker, signal.SIGKILL)
        os.waitpid(taker, 0)


def test_without_a_launcher_the_command_simply_runs() -> None:
    assert run_on_node(None, lambda: 5) == 5
    alone = read_placement(of.srun(1, size=2, tasks="1(x2)"))
    assert run_on_node(alone, lambda: 6) == 6


def test_output_that_a_launcher_passes_on_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    for environment, is_terminal in ((of.torchrun(), True), (of.open_mpi(), False)):
        monkeypatch.setattr("sys.stdout", Terminal())
        placement = read_placement(environment)
        assert placement is not None
        mark_output_as_forwarded(placement)
        assert sys.stdout.isatty() is is_terminal
