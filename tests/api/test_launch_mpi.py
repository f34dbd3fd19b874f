"""wanma launch --framework mpi: ranks that Open MPI connects, and that wanma supervises."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from support.command import Desk, Running
from support.frameworks import SCRIPTS, run_on_two_nodes
from support.networks import cable, free_address
from wanma.api.launch import mpi_launcher, mpi_process
from wanma.api.launch.mpi_gang import LauncherStart, MpiSettings
from wanma.api.launch.mpi_launcher import MpiLauncher, launcher_environment, mpirun_command
from wanma.api.launch.mpi_process import GANG_VARIABLE, receive_line, sign_command
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext

SCRIPT = str(SCRIPTS / "mpi_sum.py")
PROGRAM = """\
#include <stdio.h>
struct communicator; extern struct communicator ompi_mpi_comm_world;
int MPI_Init(int *, char ***); int MPI_Comm_rank(void *, int *); int MPI_Comm_size(void *, int *);
int MPI_Barrier(void *); int MPI_Finalize(void);
int main(int count, char **words) {
    int rank, size;
    MPI_Init(&count, &words);
    MPI_Comm_rank(&ompi_mpi_comm_world, &rank);
    MPI_Comm_size(&ompi_mpi_comm_world, &size);
    MPI_Barrier(&ompi_mpi_comm_world);
    printf("compiled: process %d of %d, %s\\n", rank, size, words[1]);
    fflush(stdout);
    MPI_Finalize();
    return count == 3 && rank == 1 ? 7 : 0;
}
"""

needs_open_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)"
)


def of_launchers(folder: Path) -> list[psutil.Process]:
    """Return the processes that connect the ranks of runs in a folder, wherever they hang in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if GANG_VARIABLE in environment and environment.get("XDG_STATE_HOME", "").startswith(str(folder)):
            found.append(process)
    return found


def check_nothing_left(desk: Desk) -> None:
    _, alive = psutil.wait_procs(of_launchers(desk.folder), timeout=60)
    assert alive == []


# ------------------------------------------------------------------ ranks


@needs_open_mpi
def test_ranks_of_one_gang_have_their_own_logs(desk: Desk) -> None:
    ran = desk.run("launch", "--framework", "mpi", "--ranks", "2", "--run-dir", "run", SCRIPT).check()
    for rank in range(2):
        expected = [f"process {rank} of 2: sum 3", f"local rank {rank}, hidden []"]
        assert ran.lines(rank) == expected
        assert "\n".join(expected) in (desk.folder / "run" / "logs" / f"rank-{rank}.log").read_text()
    assert (desk.folder / "run" / "logs" / "mpi-0.log").read_text() == ""
    shown = desk.call("show", "run").out
    assert shown.startswith("run: Finished after ")
    check_nothing_left(desk)


@needs_open_mpi
@pytest.mark.full
def test_more_ranks_than_cores_and_another_interpreter(desk: Desk, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    ranks = (os.cpu_count() or 1) + 3
    options = ("--ranks", str(ranks), "--python", str(tmp_path / "bare" / "bin" / "python"))
    ran = desk.run("launch", "--framework", "mpi", *options, SCRIPT).check()
    total = ranks * (ranks + 1) // 2
    found = [ran.lines(rank)[0] for rank in range(ranks)]
    assert found == [f"process {rank} of {ranks}: sum {total}" for rank in range(ranks)]


@needs_open_mpi
@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_compiled_program_is_a_script_too(desk: Desk) -> None:
    (desk.folder / "program.c").write_text(PROGRAM)
    command = ["cc", "program.c", "-o", "program", "-l:libmpi.so.40"]
    built = subprocess.run(command, cwd=desk.folder, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"no program can be linked with libmpi.so.40: {built.stderr}")
    launch = ("launch", "--framework", "mpi", "--ranks", "2", "./program")
    ran = desk.run(*launch, "word").check()
    assert [ran.lines(rank) for rank in range(2)] == [
        [f"compiled: process {rank} of 2, word"] for rank in range(2)
    ]
    ran = desk.run(*launch, "word", "fail").check(7)
    assert "error: rank 1 (node 0, " in ran.told_once()
    (desk.folder / "program").chmod(0o644)
    ran = desk.call(*launch)
    assert ran.code == 2
    assert "chmod +x ./program" in ran.told_once()


@needs_open_mpi
@pytest.mark.full
def test_two_supervisors_of_one_host_share_a_gang(desk: Desk) -> None:
    place = free_address()
    words = ("--framework", "mpi", "--ranks", "2", "--nodes", "2", "--rendezvous", place)
    command = ("launch", *words, "--run-dir", "both", SCRIPT)
    ended = [one.end() for one in [desk.start(*command) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    found = sorted(line for one in ended for rank in range(4) for line in one.lines(rank))
    assert [line for line in found if "sum" in line] == [f"process {rank} of 4: sum 10" for rank in range(4)]
    assert [line for line in found if "local" in line] == [
        f"local rank {rank}, hidden []" for rank in (0, 0, 1, 1)
    ]
    check_nothing_left(desk)


@needs_open_mpi
@pytest.mark.full
@pytest.mark.root
def test_hosts_without_ssh_between_them_share_a_gang(desk: Desk) -> None:
    with cable() as network:
        words = ["launch", "--framework", "mpi", "--ranks", "2", SCRIPT]
        # Both have the name and the shared memory of this host, which Open MPI would confuse.
        ended = run_on_two_nodes(desk, network, words, OMPI_MCA_btl="tcp,self")
        assert [one.code for one in ended] == [0, 0], ended
        for rank in range(4):
            assert ended[rank // 2].lines(rank)[0] == f"process {rank} of 4: sum 10"
        check_nothing_left(desk)


# ------------------------------------------------------------------ the end of a run


@needs_open_mpi
@pytest.mark.parametrize("mode", ["fails", pytest.param("aborts", marks=pytest.mark.full)])
def test_a_rank_that_fails_ends_the_run_with_its_error(desk: Desk, mode: str) -> None:
    ran = desk.run("launch", "--framework", "mpi", "--ranks", "2", "--run-dir", "run", SCRIPT, mode)
    assert ran.code != 0, ran.text
    message = ran.told_once() if mode == "aborts" else ran.text
    assert message.count("error: ") == 1
    if mode == "fails":
        assert ran.code == 1
        assert f"error: rank 1 (node 0, {socket.gethostname()}) failed: " in message
        assert "ValueError: no such column: prize" in message
    check_nothing_left(desk)


@needs_open_mpi
@pytest.mark.full
def test_the_ranks_start_again_with_a_new_launcher(desk: Desk) -> None:
    words = ("--framework", "mpi", "--ranks", "2", "--max-restarts", "1", "--run-dir", "run")
    ran = desk.run("launch", *words, SCRIPT, "fails-once").check()
    log = (desk.folder / "run" / "logs" / "rank-1.log").read_text()
    assert log.count("process 1 of 2: sum 3\n") == 2
    assert ran.lines(0)[-2:] == ["process 0 of 2: sum 3", "local rank 0, hidden []"]
    assert "  restarts   1" in desk.call("show", "run").out
    check_nothing_left(desk)


@needs_open_mpi
@pytest.mark.full
@pytest.mark.parametrize("end", ["interrupt", "kill"])
def test_no_launcher_outlives_its_run(desk: Desk, end: str) -> None:
    words = ("launch", "--framework", "mpi", "--ranks", "2", "--run-dir", "run", SCRIPT, "waits")
    going = desk.start(*words)
    logs = [desk.folder / "run" / "logs" / f"rank-{rank}.log" for rank in range(2)]
    assert going.until(lambda: all(log.exists() and "hidden" in log.read_text() for log in logs))
    going.look()
    launchers = of_launchers(desk.folder)
    names = {process.name() for process in launchers}
    assert "mpirun" in names, names
    if end == "interrupt":
        going.signal(signal.SIGINT)
        assert going.end().code == 130
    else:
        going.process.kill()  # the supervisor alone, as the kernel's out-of-memory killer would
        going.end()
    assert going.left() == []
    check_nothing_left(desk)


def fake_mpirun(desk: Desk, version: str, text: str = "exit 0") -> dict[str, str]:
    """Return the environment in which mpirun is a shell script."""
    program = desk.folder / "programs" / "mpirun"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version}"; exit; fi\n{text}\n')
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def start(desk: Desk, environment: dict[str, str], *words: str) -> Running:
    return desk.start("launch", "--framework", "mpi", "--ranks", "2", *words, SCRIPT, **environment)


def test_a_launcher_that_fails_is_quoted_in_one_message(desk: Desk) -> None:
    text = "echo 'no slots for you' >&2; exit 5"
    ran = start(desk, fake_mpirun(desk, "mpirun (Open MPI) 4.1.4", text)).end().check(1)
    message = ran.told_once()
    assert "mpirun ended with exit code 5 before" in message
    assert "no slots for you" in message
    assert f"{desk.folder}/programs/mpirun -n 1 hostname" in message


@pytest.mark.full
def test_a_launcher_that_starts_nothing_ends_at_the_start_timeout(desk: Desk) -> None:
    environment = fake_mpirun(desk, "mpirun (Open MPI) 4.1.4", "sleep 300")
    ran = start(desk, environment, "--set", "cluster.start_timeout_seconds=3").end().check(1)
    assert re.search(r"mpirun has started no process for rank [01] on node 0 within 3 s", ran.told_once())
    check_nothing_left(desk)


def test_an_mpi_other_than_open_mpi_is_refused_with_the_way_out(desk: Desk) -> None:
    ran = start(desk, fake_mpirun(desk, "HYDRA build details:")).end()
    assert ran.code == 2
    message = ran.told_once()
    assert "says 'HYDRA build details:'" in message
    assert f"`mpirun -n 2 python {SCRIPT}`" in message
    assert not (desk.folder / "runs").exists()


def test_a_missing_mpirun_is_refused_with_the_way_out(desk: Desk, tmp_path: Path) -> None:
    ran = start(desk, {"PATH": str(tmp_path)}).end()
    assert ran.code == 2
    assert "apt-get install openmpi-bin" in ran.told_once()


# ------------------------------------------------------------------ parts


@pytest.fixture
def first_of_node(tmp_path: Path) -> Callable[..., LauncherStart]:
    def make(key: str) -> LauncherStart:
        worker = WorkerContext(1, 0, 2, 1, 1, 1, tmp_path, local_world_sizes=(1, 1))
        addresses = ("127.0.0.1:1", free_address())
        (tmp_path / "logs").mkdir()
        settings = MpiSettings("/usr/bin", 4, key, 5.0)
        return LauncherStart(replace(worker, rank_addresses=addresses), settings, "gang")

    return make


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_node_runs_no_command_without_the_signature_of_its_run(
    first_of_node: Callable[..., LauncherStart], tmp_path: Path, is_signed: bool
) -> None:
    starter = first_of_node("the key")
    mark = tmp_path / "mark"
    command = f"touch {mark}"
    with starter.listen() as listener, socket.create_connection(listener.getsockname()) as connection:
        pid = os.fork()
        if pid == 0:
            with connection.makefile("rwb") as stream:
                challenge = stream.readline().decode().strip()
                signature = sign_command("the key" if is_signed else "another", challenge, command)
                stream.write(f'{{"command": "{command}", "signature": "{signature}"}}\n'.encode())
                stream.flush()
                os._exit(stream.readline() == b"accepted\n")
        assert starter.accept_command(listener) == is_signed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == is_signed
    if is_signed:
        starter._guard.wait(60)
        with pytest.raises(WanmaError, match="mpirun's daemon ended with exit code 0"):
            starter.check()
        assert mark.exists()
    assert mark.exists() == is_signed


def test_a_signature_is_of_one_command_whatever_the_challenge() -> None:
    """Whoever answers in place of a node chooses the challenge, and could have a command of his signed."""
    signed = sign_command("the key", "5eed touch /tmp/mark;", "orted")
    assert sign_command("the key", "5eed", "touch /tmp/mark; orted") != signed
    assert sign_command("the key", "5eed touch /tmp/mark;", "orted") == signed


@pytest.mark.parametrize(
    "sent",
    [b"", b"\n", b"no JSON\n", b'["command"]\n', b"[" * 20_000 + b"\n", b'{"command": "true"}\n'],
    ids=["nothing", "empty", "no JSON", "list", "deep", "unsigned"],
)
def test_whatever_a_stranger_sends_a_node_waits_on(
    first_of_node: Callable[..., LauncherStart], sent: bytes
) -> None:
    starter = first_of_node("the key")
    with starter.listen() as listener, socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert not starter.accept_command(listener)
    starter.check()


def test_a_line_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"one\n")
        assert receive_line(ours, 4) == b"one"
        theirs.sendall(b"three\n")
        with pytest.raises(ConnectionError):
            receive_line(ours, 4)
        assert ours.recv(16) == b"e\n"
        monkeypatch.setattr(mpi_process, "EXCHANGE_SECONDS", 0.3)
        is_over = threading.Event()

        def send_slowly() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(0.05):
                    theirs.sendall(b"x")

        sender = threading.Thread(target=send_slowly)
        sender.start()
        try:
            with pytest.raises(TimeoutError):
                receive_line(ours, 1 << 20)
        finally:
            is_over.set()
            sender.join()


def test_mpirun_gets_a_host_per_node_and_nothing_of_a_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_MCA_hwloc_base_binding_policy", raising=False)
    launcher = MpiLauncher("/opt/mpi/bin", 4)
    words = " ".join(mpirun_command(launcher, (2, 3)))
    assert "mpirun -n 5 -H localhost:2,wanma-node-1:3" in words
    assert "--bind-to none" in words
    monkeypatch.setenv("OMPI_MCA_hwloc_base_binding_policy", "core")
    assert "--bind-to" not in mpirun_command(launcher, (2, 3))
    outer = {
        "SLURM_JOB_ID": "7",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_orte_num_nodes": "2",
        "PMIX_RANK": "0",
        "OMPI_MCA_btl": "tcp,self",
        "PATH": "/bin",
        "HOME": "/home/me",
    }
    found = launcher_environment(outer, launcher, "eth1")
    assert {name: found[name] for name in outer if name in found} == {
        "OMPI_MCA_btl": "tcp,self",
        "PATH": "/opt/mpi/bin:/bin",
        "HOME": "/home/me",
    }
    assert found["OMPI_MCA_oob_tcp_if_include"] == "eth1"
    monkeypatch.setattr(mpi_launcher.sys, "executable", "/my programs/python")
    assert mpirun_command(launcher, (5,))
    with pytest.raises(WanmaError, match=r"a space or a colon: /my programs/python"):
        mpirun_command(launcher, (2, 3))
