"""Whatever is killed, nothing of the run survives it; and a fork happens only where it is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_until
from wanma.elastic.workers.linux_processes import process_state

SUPERVISE = """
import sys
from pathlib import Path
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.supervisor.supervisor import run_supervisor

run = Path(sys.argv[1])
entry, payload = "elastic_entries:stubborn", str(run).encode()
launch = LaunchConfig(run / "run", entry, payload, ("torch",), ranks_per_node=2)
outcome = run_supervisor(launch, lambda event: None)
print(outcome.failure_text)
sys.exit(outcome.exit_code)
"""


class Victim:
    """A supervisor in a process of its own, with two ranks that run."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", SUPERVISE, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        files = [folder / f"pids-{rank}" for rank in (0, 1)]
        wait_until(lambda: all(" " in file.read_text() for file in files), "both ranks", 200, pause=0.02)
        pairs = [[int(pid) for pid in file.read_text().split()] for file in files]
        self.ranks, self.grandchildren = (list(column) for column in zip(*pairs, strict=True))
        self.fork_server = parent_of(self.ranks[0])

    def clean_up(self) -> None:
        for pid in (self.process.pid, *self.grandchildren):
            if process_state(pid) not in ("gone", "dead"):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def victim(tmp_path: Path) -> Any:
    victim = Victim(tmp_path)
    yield victim
    victim.clean_up()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def all_gone(pids: list[int]) -> bool:
    return all(process_state(pid) in ("gone", "dead") for pid in pids)


def test_a_killed_supervisor_takes_fork_server_and_ranks_with_it(victim: Victim) -> None:
    groups = {os.getpgid(pid) for pid in (victim.process.pid, victim.fork_server, *victim.ranks)}
    assert len(groups) == 4, "a terminal's Ctrl-C reaches only the supervisor"
    victim.process.kill()
    wait_until(lambda: all_gone([victim.fork_server, *victim.ranks]), "the end of all", 200)


def test_a_killed_fork_server_takes_the_ranks_with_it_and_is_reported(victim: Victim) -> None:
    os.kill(victim.fork_server, signal.SIGKILL)
    printed, _ = victim.process.communicate(timeout=200)
    assert "fork server" in printed
    assert "was killed by SIGKILL" in printed
    assert victim.process.returncode == 1
    assert all_gone(victim.ranks)


def test_a_killed_rank_takes_its_children_and_the_other_ranks_with_it(victim: Victim) -> None:
    os.kill(victim.ranks[1], signal.SIGKILL)
    printed, _ = victim.process.communicate(timeout=200)
    assert printed.startswith("rank 1 (")
    assert victim.process.returncode == 1
    assert all_gone([victim.fork_server, *victim.ranks, *victim.grandchildren])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_module_that_starts_threads_makes_the_ranks_spawn_with_one_message(run: Any, ranks: int) -> None:
    ran = run("finish", preload_modules=("elastic_threads",), ranks_per_node=ranks)
    assert ran.outcome.exit_code == 0
    assert ran.messages == [
        "ranks start by exec instead of fork, which is slower: 1 other thread (impatient) still runs "
        "after the imports"
    ]
    for rank in range(ranks):
        assert ran.log(rank).splitlines()[0].endswith("spawned ---")
        assert "payload ''" in ran.log(rank)


def test_a_module_that_opens_sockets_makes_the_ranks_spawn(run: Any) -> None:
    ran = run("finish", preload_modules=("elastic_socket",))
    assert ran.outcome.exit_code == 0
    assert "an import opened a socket" in ran.messages[0]


def test_a_spawned_rank_fails_like_a_forked_one(run: Any) -> None:
    ran = run("exit_with_3", preload_modules=("elastic_threads",))
    assert ran.outcome.failure.cause == "SystemExit: 3"


def test_a_module_that_cannot_be_preloaded_is_told_and_does_no_harm(run: Any) -> None:
    ran = run("finish", preload_modules=("no_such_module",))
    assert ran.outcome.exit_code == 0
    assert ran.messages[0].startswith("no_such_module could not be preloaded")


def test_importing_torch_alone_leaves_a_process_that_may_fork() -> None:
    code = "import torch; from wanma.elastic.workers.linux_processes import find_fork_hazard; "
    code += "print(repr(find_fork_hazard(())))"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == "''"


def test_own_sockets_are_no_obstacle_and_foreign_ones_are() -> None:
    code = """
import socket
from wanma.elastic.workers.linux_processes import find_fork_hazard
a, b = socket.socketpair()
print(find_fork_hazard({a.fileno(), b.fileno()}) == "")
print(find_fork_hazard({a.fileno()}))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, second = printed.splitlines()
    assert first == "True"
    assert second.startswith("an import opened a socket (descriptor ")
