"""Messages between two ranks over shared memory: sent without waiting, copied out where they are waited for.

A message lies in its sender's heap until its receiver has it. Messages of one rank to another with the same
tag arrive in the order in which they were sent, and go to receives in the order in which those were asked.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import abstractmethod
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from wanma.collectives.shared.arena import Arena
from wanma.collectives.shared.calls import plain
from wanma.collectives.shared.errors import SharedMemoryError
from wanma.collectives.shared.library import Outcome
from wanma.collectives.shared.record import KEPT, Entry

ANYBODY = -1
"""As the source of a message."""
_SLICE_SECONDS = 1e-3
"""For so long a rank waits for anything else while not all that it sends has found room."""


class Told(Protocol):
    """What the group knows: names, and errors."""

    def seconds(self) -> float:
        """For so long whoever has no time of its own waits."""

    def describe(self, what: str, number: int, peer: int) -> str:
        """'recv #3 from rank 1 of group pp'."""

    def failure(self, outcome: Outcome, what: str, blamed: int, seconds: float) -> SharedMemoryError:
        """What is raised."""


@dataclass
class Asked:
    """One message, for the hang report: without its tensor, which is not to live for as long."""

    number: int
    what: str
    """'send' or 'recv'."""
    peer: int
    nanoseconds: int
    """When, since 1970."""
    done: bool = False


class MessageWork(dist.Work):
    """A message that was asked for: what torch waits for."""

    def __init__(self, messages: Messages, asked: Asked, tag: int, tensor: Tensor) -> None:
        super().__init__()
        self._messages, self.asked, self.tag = messages, asked, tag
        self.tensor: Tensor | None = tensor
        """What is sent or received; a message that was sent keeps it no longer."""
        self.error: SharedMemoryError | None = None
        self._future: Future[Any] | None = None

    @property
    def done(self) -> bool:
        return self.asked.done

    @abstractmethod
    def finish(self, seconds: float) -> None:
        """Until it is done, or time is over; 0 seconds: whatever can be done at once.

        Raises:
            SharedMemoryError: it will not be done.
        """

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until it is done; for at most `timeout`, where that is not 0.

        Raises:
            SharedMemoryError: it will not be done, or the time is over. After the group's own time the group
                is of no use any more; after `timeout` one may wait again.
        """
        if not self.done:
            self._messages.wait(self, timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        if not self.done and self.error is None:
            try:
                self.finish(0.0)
            except SharedMemoryError as error:
                self.error = error
        return self.done or self.error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def _source_rank(self) -> int:
        return self.asked.peer

    def get_future(self) -> Future[Any]:
        """Gets the tensor when it is there; a thread of its own waits for it then."""
        if self._future is None:
            self._future = Future()
            if self.is_completed():
                self._complete()
            else:
                threading.Thread(target=self._complete, name="wanma-message", daemon=True).start()
        return self._future

    def _complete(self) -> None:
        assert self._future is not None
        try:
            self.wait()
        except Exception as error:  # a thread has nobody to raise to: whoever waits for the future gets it
            self._future.set_exception(error)
        else:
            self._future.set_result(self.result())

    # What torch's own works are called by.
    getFuture = get_future  # noqa: N815


class _Send(MessageWork):
    def finish(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.done:
            self._messages.push()
            if self.done or time.monotonic() >= deadline:
                return
            self._messages.rest(self)


class _Receive(MessageWork):
    line: _Line

    def finish(self, seconds: float) -> None:
        deadline, line = time.monotonic() + seconds, self.line
        if not line.lock.acquire(timeout=max(seconds, 0.0)):
            return
        try:
            while not self.done:
                left = max(deadline - time.monotonic(), 0.0)
                first = line.asked[0]
                if self._messages.take(first, left if self._messages.push() else min(left, _SLICE_SECONDS)):
                    line.asked.popleft()
                elif left == 0.0:
                    return
        finally:
            line.lock.release()


class _Line:
    """Receives of one source and tag that are not done; who holds the lock does the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked: deque[_Receive] = deque()


class _Outbox:
    """To one rank."""

    def __init__(self) -> None:
        self.sent = 0
        self.places: deque[tuple[int, int]] = deque()
        """(number, offset in the heap) of messages that may not have been taken."""
        self.waiting: deque[_Send] = deque()
        """For room."""


class Messages:
    """Of one rank in one group."""

    def __init__(self, arena: Arena, told: Told) -> None:
        self._arena, self._told = arena, told
        self._lock = threading.Lock()
        self._outboxes = [_Outbox() for _ in range(arena.shape.ranks)]
        self._waiting = 0
        """Messages for which there was no room."""
        self._lines: dict[tuple[int, int], _Line] = {}
        self._recent: deque[Asked] = deque(maxlen=KEPT)
        self._number = 0

    def send(self, tensor: Tensor, peer: int, tag: int) -> MessageWork:
        """Raises ValueError for a tensor that does not lie in one piece of this host's memory."""
        if not plain([tensor]):
            raise ValueError("send takes a contiguous CPU tensor")
        with self._lock:
            work = _Send(self, self._asked("send", peer), tag, tensor)
            self._outboxes[peer].waiting.append(work)
            self._waiting += 1
            self._push(peer)
        return work

    def receive(self, tensor: Tensor, peer: int, tag: int) -> MessageWork:
        """As `send`; `peer` may be `ANYBODY`."""
        if not plain([tensor]):
            raise ValueError("recv takes a contiguous CPU tensor")
        with self._lock:
            work = _Receive(self, self._asked("recv", peer), tag, tensor)
            work.line = self._lines.setdefault((peer, tag), _Line())
            work.line.asked.append(work)
        return work

    def standing(self) -> tuple[list[Entry], list[Entry]]:
        """Messages that were sent or received, and those under way, oldest first."""
        ended: list[Entry] = []
        under_way: list[Entry] = []
        for asked in list(self._recent):
            entry = Entry(asked.nanoseconds, asked.number, self._text(asked))
            (ended if asked.done else under_way).append(entry)
        return ended, under_way

    # ------------------------------------------------------------------ what works ask for

    def wait(self, work: MessageWork, seconds: float) -> None:
        if work.error is not None:
            raise work.error
        for_a_while = seconds > 0
        seconds = seconds or self._told.seconds()
        work.finish(seconds)
        if work.done:
            return
        blamed = self._arena.rank if work.asked.peer == ANYBODY else work.asked.peer
        if for_a_while:
            raise self._told.failure(Outcome.UNDER_WAY, self._text(work.asked), blamed, seconds)
        self._arena.library.wanma_give_up(self._arena.handle, Outcome.LATE, blamed)
        raise self._told.failure(Outcome.LATE, self._text(work.asked), blamed, seconds)

    def push(self) -> bool:
        """Send what found no room before; whether nothing is left."""
        if self._waiting:
            with self._lock:
                for peer in range(len(self._outboxes)):
                    self._push(peer)
        return self._waiting == 0

    def rest(self, work: MessageWork) -> None:
        """Until something was sent or taken, but not for long."""
        arena, cause = self._arena, ctypes.c_int(-1)
        seen = arena.library.wanma_mail(arena.handle)
        nanoseconds = int(_SLICE_SECONDS * 1e9)
        outcome = arena.library.wanma_rest(
            arena.handle, work.asked.peer, seen, nanoseconds, ctypes.byref(cause)
        )
        if outcome != Outcome.DONE:
            raise self._told.failure(Outcome(outcome), self._text(work.asked), cause.value, 0.0)

    def take(self, work: _Receive, seconds: float) -> bool:
        """Receive into the tensor of `work`, in at most so many seconds; whether it is there."""
        arena, tensor = self._arena, work.tensor
        assert tensor is not None
        cause, source = ctypes.c_int(-1), ctypes.c_int(work.asked.peer)
        outcome = Outcome(
            arena.library.wanma_receive(
                arena.handle,
                ctypes.byref(source),
                work.tag,
                tensor.data_ptr(),
                tensor.nbytes,
                int(seconds * 1e9),
                ctypes.byref(cause),
            )
        )
        if outcome is Outcome.UNDER_WAY:
            return False
        if outcome is not Outcome.DONE:
            if outcome is Outcome.MISMATCH:
                arena.library.wanma_give_up(arena.handle, outcome, cause.value)
            raise self._told.failure(outcome, self._text(work.asked), cause.value, self._told.seconds())
        work.asked.peer, work.asked.done = source.value, True
        return True

    # ------------------------------------------------------------------ inside

    def _push(self, peer: int) -> None:
        """Send what fits of what is for `peer`; with the lock held."""
        arena, box = self._arena, self._outboxes[peer]
        taken = arena.library.wanma_taken(arena.handle, peer)
        while box.places and (taken - box.places[0][0]) % 2**32 < 2**31:
            arena.give_back(box.places.popleft()[1])
        while box.waiting:
            work = box.waiting[0]
            assert work.tensor is not None
            offset = arena.take(work.tensor.nbytes)
            if offset is None:
                return
            cause = ctypes.c_int(-1)
            outcome = Outcome(
                arena.library.wanma_send(
                    arena.handle,
                    peer,
                    work.tag,
                    work.tensor.data_ptr(),
                    work.tensor.nbytes,
                    offset,
                    ctypes.byref(cause),
                )
            )
            if outcome is not Outcome.DONE:
                arena.give_back(offset)
                if outcome is Outcome.UNDER_WAY:
                    return
                raise self._told.failure(outcome, self._text(work.asked), cause.value, 0.0)
            box.waiting.popleft()
            self._waiting -= 1
            box.sent += 1
            box.places.append((box.sent, offset))
            work.tensor, work.asked.done = None, True

    def _asked(self, what: str, peer: int) -> Asked:
        self._number += 1
        self._recent.append(Asked(self._number, what, peer, time.time_ns()))
        return self._recent[-1]

    def _text(self, asked: Asked) -> str:
        return self._told.describe(asked.what, asked.number, asked.peer)
