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

from wanma.elastic.protocol.framing import LINE_LIMIT, Framer, encode
from wanma.elastic.protocol.local_messages import (
    Exited,
    Fork,
    KeepStore,
    Prepare,
    Ready,
    Signal,
    Spawn,
    Started,
    WorkerSpec,
)
from wanma.elastic.protocol.messages import (
    Message,
)
from wanma.elastic.workers.linux_processes import die_with_parent, fork_obstacle
from wanma.elastic.workers.malloc_reserve import set_small_places_aside
from wanma.elastic.workers.signal_dispositions import in_child
from wanma.elastic.workers.store_server import keep_store
from wanma.elastic.workers.worker_process import run_worker

MAX_DESCRIPTORS = 8


class ForkServer:
    """Single-threaded server of the supervisor's commands, which also reaps workers."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pids: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._keeper: int | None = None
        """Process that serves the newest generation's store."""
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
                if self._control in ready and not self._packet():
                    break
        for rank in self._pids:
            self._signal(rank, signal.SIGKILL, group=True)
        self._end_keeper()
        self._reap(0)

    def _packet(self) -> bool:
        try:
            data, descriptors, _flags, _address = socket.recv_fds(
                self._control, LINE_LIMIT, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        if not data:
            return False
        framer = Framer()
        framer.feed(data)
        message = framer.next()
        match message:
            case Prepare(modules, path):
                self._prepare(modules, path)
            case Fork(spec):
                self._start(spec, descriptors)
            case KeepStore():
                self._keep(message, descriptors)
            case Signal(rank, number, group):
                self._signal(rank, number, group)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _prepare(self, modules: tuple[str, ...], path: tuple[str, ...]) -> None:
        sys.path[:] = path
        notes = []
        gc.disable()  # imports make only long-lived objects
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception:
                notes.append(f"{module} could not be imported beforehand:\n{traceback.format_exc()}")
        set_small_places_aside(os.environ.get("GLIBC_TUNABLES", ""))
        gc.freeze()  # collections in the workers leave the shared pages alone, so they stay shared
        gc.enable()
        self._send(Ready(tuple(notes)))

    def _start(self, spec: WorkerSpec, descriptors: list[int]) -> None:
        obstacle = fork_obstacle({self._control.fileno(), *descriptors})
        pid = self._spawn(spec, descriptors) if obstacle else self._fork(spec, descriptors)
        self._pids[spec.rank], self._ranks[pid] = pid, spec.rank
        self._send(Started(spec.rank, pid, obstacle))

    def _fork(self, spec: WorkerSpec, descriptors: list[int]) -> int:
        pid = self._child()
        if pid == 0:
            run_worker(spec, descriptors, "forked")  # never returns
        return pid

    def _child(self) -> int:
        """Fork; in the child, which gets 0, close everything of the server."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            in_child(parent)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
        return pid

    def _keep(self, order: KeepStore, descriptors: list[int]) -> None:
        """Start the process of a generation's store, and end that of the generation before."""
        self._end_keeper()
        if fork_obstacle({self._control.fileno(), *descriptors}):
            module = "wanma.elastic.workers.store_server"
            words = [str(word) for word in (os.getpid(), *descriptors, order.host, order.port)]
            process = subprocess.Popen([sys.executable, "-P", "-m", module, *words], pass_fds=descriptors)
            process.returncode = 0  # as for a rank
            self._keeper = process.pid
        elif (pid := self._child()) == 0:
            keep_store(descriptors[0], order.host, order.port)  # never returns
        else:
            self._keeper = pid

    def _end_keeper(self) -> None:
        """Kill the store's process; it is reaped with the ranks', or by the kernel when this process ends."""
        if self._keeper is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper, signal.SIGKILL)
            self._keeper = None

    def _spawn(self, spec: WorkerSpec, descriptors: list[int]) -> int:
        order = os.memfd_create("wanma-order", os.MFD_CLOEXEC)
        os.pwrite(order, encode(Spawn(spec, tuple(descriptors), tuple(sys.path))), 0)
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

    def _signal(self, rank: int, number: int, group: bool) -> None:
        if (pid := self._pids.get(rank)) is None:
            return
        try:
            if group:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            # It has not yet made its own group: it is alone, and it cannot be reaped meanwhile.
            os.kill(pid, number)

    def _reap(self, options: int) -> None:
        while self._ranks:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | options)
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self._ranks:
                # Kill its children, too, while the zombie still holds its process id.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid == self._keeper:
                self._keeper = None
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                del self._pids[rank]
                self._send(Exited(rank, os.waitstatus_to_exitcode(status)))

    def _send(self, message: Message) -> None:
        # After the supervisor's end, the next read notices it and ends the workers.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(encode(message))


def main() -> None:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
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
