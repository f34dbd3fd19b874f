"""Single-threaded event loop of a supervisor for sockets, timers and signals."""

from __future__ import annotations

import heapq
import itertools
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar, cast

Answer = TypeVar("Answer")


class Timer:
    """Handle of a call in the future."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class EventLoop:
    """Event loop: callbacks for readable and writable sockets, for points in time, and for signals."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: dict[int, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._old_wakeup = -1

    def run_until(self, done: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Run callbacks until `done()`; return False if `deadline` (monotonic) comes first."""
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            while self._timers and self._timers[0][0] <= now:
                callback = heapq.heappop(self._timers)[2].callback
                if callback is not None:
                    callback()
            if done():
                break
            wake_time = min(self._timers[0][0] if self._timers else float("inf"), deadline)
            timeout = None if wake_time == float("inf") else max(0.0, wake_time - time.monotonic())
            for key, events in self._selector.select(timeout):
                # An earlier callback of this round may have closed a later one's socket.
                if isinstance(key.fileobj, socket.socket) and self._is_watched(key.fileobj):
                    key.data(events)
        return True

    def call_in_thread(
        self, function: Callable[[], Answer], on_answer: Callable[[Answer], None], name: str
    ) -> None:
        """Call `function` in a thread of its own, and `on_answer` with its result in the loop.

        An error in `function` is raised in the loop.
        """
        answers: list[tuple[Answer | None, Exception | None]] = []
        receiver, sender = socket.socketpair()

        def call() -> None:
            try:
                answers.append((function(), None))
            except Exception as error:  # the loop raises it
                answers.append((None, error))
            sender.close()

        def answered(_events: int) -> None:
            self.unwatch(receiver)
            receiver.close()
            ((answer, error),) = answers
            if error is not None:
                raise error
            on_answer(cast(Answer, answer))

        self.watch(receiver, answered, selectors.EVENT_READ)
        threading.Thread(target=call, daemon=True, name=name).start()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def watch(self, sock: socket.socket, callback: Callable[[int], None], events: int) -> None:
        """Call `callback(events)` when the socket is ready; replaces an earlier watch of it."""
        if self._is_watched(sock):
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        if self._is_watched(sock):
            self._selector.unregister(sock)

    def _is_watched(self, sock: socket.socket) -> bool:
        return sock.fileno() >= 0 and sock in self._selector.get_map()

    def handle_signals(self, numbers: Iterable[int], callback: Callable[[int], None]) -> None:
        """Turn these signals into callbacks; in a thread other than the main one, do nothing.

        A SIGHUP that is ignored stays so: `nohup` asks for that.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._old_wakeup = signal.set_wakeup_fd(writer.fileno())

        def ignore(_number: int, _frame: FrameType | None) -> None:
            """Replace the signal's default action; the wake-up byte carries the signal."""

        for number in numbers:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._signals[number] = signal.signal(number, ignore)

        def received(_events: int) -> None:
            for number in reader.recv(64):
                if number in self._signals:
                    callback(number)

        self.watch(reader, received, selectors.EVENT_READ)

    def close(self) -> None:
        """Restore the signal handlers and stop watching everything."""
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            for sock in self._wakeup:
                self.unwatch(sock)
                sock.close()
        self._selector.close()
