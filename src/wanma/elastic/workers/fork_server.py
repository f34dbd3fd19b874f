"""Fork server: process that imports torch once and forks the workers of a node.

Its supervisor starts it by exec, with the job's allocator and thread settings in the environment, before
anything else, so that the imports overlap the command's other work. It is the parent of the ranks: it reaps
them and reports how they ended. When its supervisor ends, the kernel kills it, and with it the ranks. When a
fork would be unsafe, it starts the same worker by exec.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback

from wanma.elastic.protocol.framing import MAX_LINE_BYTES, Framer, encode
from wanma.elastic.protocol.local_messages import (
    ExecArguments,
    ForkCommand,
    PreloadCommand,
    PreloadReport,
    ServeStoreCommand,
    SignalCommand,
    WorkerExitReport,
    WorkerSpec,
    WorkerStartReport,
)
from wanma.elastic.protocol.messages import (
    Message,
)
from wanma.elastic.workers.linux_processes import find_fork_hazard
from wanma.elastic.workers.malloc_reserve import reserve_small_blocks
from wanma.elastic.workers.signal_dispositions import configure_child_process
from wanma.elastic.workers.store_server import run_store_server
from wanma.elastic.workers.worker_process import run_worker
from wanma.job.run.child_process import kill_on_parent_exit

MAX_DESCRIPTORS = 8


class ForkServer:
    """Single-threaded server of the supervisor's commands, which also reaps workers."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._store_pid: int | None = None
        """Process that serves the newest generation's store."""
        self._import_errors: list[str] = []
        self._wake_read, self._wake_write = os.pipe()
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)

    def serve(self) -> None:
        """Serve until the supervisor closes its end, then kill all workers."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            self._selector = selector
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                    self._reap(os.WNOHANG)
                if self._control in ready and not self._handle_packet():
                    break
        for rank in self._pids:
            self._signal(rank, signal.SIGKILL, to_process_group=True)
        self._kill_store_server()
        self._reap(0)

    def _handle_packet(self) -> bool:
        try:
            data, descriptors, _flags, _address = socket.recv_fds(
                self._control, MAX_LINE_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        if not data:
            return False
        framer = Framer()
        framer.feed(data)
        message = framer.read_message()
        match message:
            case PreloadCommand():
                self._preload(message)
            case ForkCommand(spec):
                self._start_worker(spec, descriptors)
            case ServeStoreCommand():
                self._start_store_server(message, descriptors)
            case SignalCommand(rank, number, group):
                self._signal(rank, number, group)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _preload(self, command: PreloadCommand) -> None:
        sys.path[:] = command.sys_path
        gc.disable()  # imports make only long-lived objects
        for module in command.modules:
            try:
                name, _, function = module.partition(":")
                imported = importlib.import_module(name)
                if function:
                    getattr(imported, function)()
            except Exception:
                self._import_errors.append(f"{module} could not be preloaded:\n{traceback.format_exc()}")
        if not command.is_last:
            return
        reserve_small_blocks(os.environ.get("GLIBC_TUNABLES", ""))
        gc.freeze()  # collections in the workers leave the shared pages alone, so they stay shared
        gc.enable()
        self._send(PreloadReport(tuple(self._import_errors)))

    def _start_worker(self, spec: WorkerSpec, descriptors: list[int]) -> None:
        obstacle = find_fork_hazard({self._control.fileno(), *descriptors})
        pid = self._exec_worker(spec, descriptors) if obstacle else self._fork_worker(spec, descriptors)
        self._pids[spec.rank], self._ranks[pid] = pid, spec.rank
        self._send(WorkerStartReport(spec.rank, pid, obstacle))

    def _fork_worker(self, spec: WorkerSpec, descriptors: list[int]) -> int:
        pid = self._fork_child()
        if pid == 0:
            run_worker(spec, descriptors, "forked")  # never returns
        return pid

    def _fork_child(self) -> int:
        """Fork; in the child, which gets 0, close everything of the server."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            configure_child_process(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        return pid

    def _start_store_server(self, command: ServeStoreCommand, descriptors: list[int]) -> None:
        """Start the process of a generation's store, and end that of the generation before."""
        self._kill_store_server()
        if find_fork_hazard({self._control.fileno(), *descriptors}):
            module = "wanma.elastic.workers.store_server"
            arguments = [
                str(argument)
                for argument in (os.getpid(), *descriptors, command.host, command.port, command.store_kind)
            ]
            process = subprocess.Popen([sys.executable, "-P", "-m", module, *arguments], pass_fds=descriptors)
            process.returncode = 0  # as for a rank
            self._store_pid = process.pid
        elif (pid := self._fork_child()) == 0:
            run_store_server(descriptors[0], command.host, command.port, command.store_kind)  # never returns
        else:
            self._store_pid = pid

    def _kill_store_server(self) -> None:
        """Kill the store's process; it is reaped with the ranks', or by the kernel when this process ends."""
        if self._store_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._store_pid, signal.SIGKILL)
            self._store_pid = None

    def _exec_worker(self, spec: WorkerSpec, descriptors: list[int]) -> int:
        order = os.memfd_create("wanma-order", os.MFD_CLOEXEC)
        os.pwrite(order, encode(ExecArguments(spec, tuple(descriptors), tuple(sys.path))), 0)
        command = [
            sys.executable,
            "-P",
            "-m",
            "wanma.elastic.workers.worker_process",
            str(order),
            str(os.getpid()),
        ]
        process = subprocess.Popen(command, pass_fds=(order, *descriptors))
        os.close(order)
        process.returncode = 0  # reaped here, by pid: not by subprocess
        return process.pid

    def _signal(self, rank: int, number: int, to_process_group: bool) -> None:
        if (pid := self._pids.get(rank)) is None:
            return
        try:
            if to_process_group:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            # It has not yet made its own group: it is alone, and it cannot be reaped meanwhile.
            os.kill(pid, number)

    def _reap(self, options: int) -> None:
        while self._ranks:
            child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if child is None:
                return
            pid = child.si_pid
            if pid in self._ranks:
                # Kill its children, too, while the zombie still holds its process id.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid == self._store_pid:
                self._store_pid = None
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                del self._pids[rank]
                self._send(WorkerExitReport(rank, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Message) -> None:
        # After the supervisor's end, the next read notices it and ends the workers.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(encode(message))


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    kill_on_parent_exit(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    ForkServer(socket.socket(fileno=descriptor)).serve()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    # Ranks end as an interpreter does. This process has only imported, and Python would take its 3,000
    # modules apart for 0.3 s, for which the command waits.
    os._exit(0)


if __name__ == "__main__":
    main()
