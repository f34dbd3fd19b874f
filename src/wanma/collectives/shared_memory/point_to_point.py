"""Point-to-point messages over shared memory: send returns at once, receive copies when waited for.

A message lies in its sender's heap until its receiver has copied it. Messages from one rank to another with
the same tag arrive in the order in which they were sent, and go to receives in the order of their calls.
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.futures import Future

from wanma.collectives.shared_memory.arena import Arena
from wanma.collectives.shared_memory.errors import SharedMemoryError
from wanma.collectives.shared_memory.flight_recorder import KEPT, Entry
from wanma.collectives.shared_memory.native_calls import plain
from wanma.collectives.shared_memory.native_library import Outcome

ANYBODY = -1
"""Source rank of a message from any rank."""
MOST_BYTES = 1 << 28
"""Most bytes of messages to one rank that it has not received; later ones wait.

A single larger message passes. A channel takes 1,024 messages (native/arena.hpp), counted from the oldest
that was not received.
"""
_SLICE_SECONDS = 1e-3
"""Time, in seconds, between two attempts to send messages that wait for room."""


class Told(Protocol):
    """Group that messages belong to: its timeout, names and errors."""

    def seconds(self) -> float:
        """Return the timeout, in seconds, of a wait that has none of its own."""

    def describe(self, what: str, number: int, peer: int) -> str:
        """Describe a message: 'recv #3 from rank 1 of group pp'."""

    def failure(self, outcome: Outcome, what: str, blamed: int, seconds: float) -> SharedMemoryError:
        """Return the error to raise for a failed message."""


@dataclass
class Asked:
    """Record of one message for the hang report; without its tensor, which is not to live as long."""

    number: int
    what: str
    """Direction: 'send' or 'recv'."""
    peer: int
    nanoseconds: int
    """Time of the call, or of the last wait for it, in nanoseconds since 1970."""
    waits: int = 0
    """Number of threads that wait for it now."""
    done: bool = False


class MessageWork(dist.Work):
    """Handle of one message, as torch's callers wait for it."""

    def __init__(self, messages: Messages, asked: Asked, tag: int, tensor: Tensor) -> None:
        super().__init__()
        self._messages, self.asked, self.tag = messages, asked, tag
        self.tensor: Tensor | None = tensor
        """Tensor to send or to receive into; a message that was sent keeps it no longer."""
        self.error: SharedMemoryError | None = None
        self._future: Future[Any] | None = None

    @property
    def done(self) -> bool:
        return self.asked.done

    @abstractmethod
    def finish(self, seconds: float) -> None:
        """Wait until the message is complete or the time is over; 0 seconds: only do what needs no wait.

        Raises:
            SharedMemoryError: it will not complete.
        """

    def attempt(self, seconds: float) -> None:
        """Call `finish`; keep the error as well as raise it."""
        try:
            if self.error is not None:
                raise self.error
            self.finish(seconds)
        except SharedMemoryError as error:
            self.error = error
            raise

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the message is complete, for at most `timeout` unless that is 0.

        Raises:
            SharedMemoryError: it will not complete, or the time is over. After the group's own timeout
                the group is unusable; after `timeout` the caller may wait again.
        """
        if not self.done:
            self._messages.wait(self, timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        if not self.done and self.error is None:
            with suppress(SharedMemoryError):
                self.attempt(0.0)
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
        """Return a future that gets the tensor when it is complete; a thread of its own waits for it."""
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
        except Exception as error:  # the thread has no caller: the future gets the error
            self._future.set_exception(error)
        else:
            self._future.set_result(self.result())

    # Torch's names of these methods.
    getFuture = get_future  # noqa: N815
    source_rank = _source_rank


class _Send(MessageWork):
    def finish(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.done:
            seen = self._messages.mail()
            self._messages.push()
            if self.error is not None:
                raise self.error
            if self.done or time.monotonic() >= deadline:
                return
            self._messages.rest(seen)


class _Receive(MessageWork):
    line: _Line

    def finish(self, seconds: float) -> None:
        deadline, line = time.monotonic() + seconds, self.line
        if not line.lock.acquire(timeout=max(seconds, 0.0)):
            return
        try:
            while not self.done:
                left = max(deadline - time.monotonic(), 0.0)
                if self._messages.take(line.asked[0], left):
                    line.asked.popleft()
                elif left == 0.0:
                    return
        finally:
            line.lock.release()
        self._messages.tidy(line)


class _Line:
    """Queue of pending receives from one source with one tag; the holder of the lock does the first."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.asked: deque[_Receive] = deque()


class _Outbox:
    """Queue of messages to one rank."""

    def __init__(self) -> None:
        self.sent = 0
        self.places: deque[tuple[int, int, int]] = deque()
        """Messages that may not have been received, as (number, offset in the heap, bytes)."""
        self.waiting: deque[_Send] = deque()
        """Messages that wait for room."""

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.places)


class Messages:
    """Point-to-point messages of one rank in one group."""

    def __init__(self, arena: Arena, told: Told) -> None:
        self._arena, self._told = arena, told
        self._lock = threading.Lock()
        self._outboxes = [_Outbox() for _ in range(arena.shape.ranks)]
        self._waiting = 0
        """Number of messages that wait for room."""
        self._sender: threading.Thread | None = None
        """Thread that sends messages waiting for room, while there are any: callers may be elsewhere."""
        self._lines: dict[tuple[int, int], _Line] = {}
        self._recent: deque[Asked] = deque(maxlen=KEPT)
        self._number = 0

    def send(self, tensor: Tensor, peer: int, tag: int) -> MessageWork:
        """Send a tensor and return its handle at once.

        Raises:
            ValueError: there is no such rank or tag, or the tensor is not contiguous in this host's memory.
            SharedMemoryError: the rank is gone.
        """
        tensor = self._checked("send", tensor, peer, tag)
        if tensor.nbytes > self._arena.shape.heap_bytes:
            raise ValueError(f"send: {tensor.nbytes} bytes are more than a rank has of the shared memory")
        with self._lock:
            work = _Send(self, self._asked("send", peer), tag, tensor)
            self._outboxes[peer].waiting.append(work)
            self._waiting += 1
            self._push(peer)
            if self._waiting and self._sender is None:
                self._sender = threading.Thread(target=self._send_rest, name="wanma-messages", daemon=True)
                self._sender.start()
        if work.error is not None:
            raise work.error
        return work

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> MessageWork:
        """Receive into a tensor and return its handle at once; raises what `send` does.

        Without `peer` the message may come from any rank. A message goes to the receive that waits first,
        whether that names its source or not.
        """
        tensor = self._checked("recv", tensor, peer or 0, tag)
        peer = ANYBODY if peer is None else peer
        with self._lock:
            work = _Receive(self, self._asked("recv", peer), tag, tensor)
            work.line = self._lines.setdefault((peer, tag), _Line((peer, tag)))
            work.line.asked.append(work)
        return work

    def standing(self) -> tuple[list[Entry], list[Entry]]:
        """Return the messages that have ended, and those that a thread waits for, each oldest first."""
        ended: list[Entry] = []
        under_way: list[Entry] = []
        for asked in list(self._recent):
            entry = Entry(asked.nanoseconds, asked.number, self._text(asked))
            if asked.done:
                ended.append(entry)
            elif asked.waits:
                under_way.append(entry)
        return ended, under_way

    # ------------------------------------------------------------------ what works ask for

    def wait(self, work: MessageWork, seconds: float) -> None:
        asked, for_a_while = work.asked, seconds > 0
        asked.waits, asked.nanoseconds = asked.waits + 1, time.time_ns()
        try:
            seconds = seconds or self._seconds()
            work.attempt(seconds)
            if work.done:
                return
            if for_a_while:
                raise self._failure(Outcome.UNDER_WAY, asked, asked.peer, seconds)
            self._arena.library.wanma_give_up(self._arena.handle, Outcome.LATE, asked.peer)
            work.error = self._failure(Outcome.LATE, asked, asked.peer, seconds)
            raise work.error
        finally:
            asked.waits -= 1

    def mail(self) -> int:
        """Return a number that changes whenever a message is sent to this rank or received from it."""
        return int(self._arena.library.wanma_mail(self._arena.handle))

    def rest(self, seen: int) -> None:
        """Wait until `mail` differs from `seen`, for a short time at most."""
        self._arena.library.wanma_rest(self._arena.handle, seen, int(_SLICE_SECONDS * 1e9))

    def push(self) -> None:
        """Send the messages that waited for room."""
        if self._waiting:
            with self._lock:
                for peer in range(len(self._outboxes)):
                    self._push(peer)

    def take(self, work: _Receive, seconds: float) -> bool:
        """Receive into the tensor of `work`, in at most `seconds`; return True if it is complete."""
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
            raise self._failure(outcome, work.asked, cause.value, self._seconds())
        work.asked.peer, work.asked.done = source.value, True
        return True

    def tidy(self, line: _Line) -> None:
        """Delete a queue without receives: tags may be many."""
        with self._lock:
            if not line.asked and self._lines.get(line.key) is line:
                del self._lines[line.key]

    # ------------------------------------------------------------------ inside

    def _checked(self, what: str, tensor: Tensor, peer: int, tag: int) -> Tensor:
        if not 0 <= peer < self._arena.shape.ranks:
            raise ValueError(f"{what}: there is no rank {peer} in a group of {self._arena.shape.ranks}")
        if not 0 <= tag < 1 << 31:
            raise ValueError(f"{what}: a tag is from 0 to 2^31 - 1, not {tag}")
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        if not plain([tensor]):
            raise ValueError(f"{what} takes a contiguous CPU tensor")
        return tensor

    def _push(self, peer: int) -> None:
        """Send the messages to `peer` that have room; the caller holds the lock."""
        arena, box = self._arena, self._outboxes[peer]
        while box.places and self._was_taken(peer, box.places[0][0]):
            arena.give_back(box.places.popleft()[1])
        while box.waiting:
            work, cause = box.waiting[0], ctypes.c_int(-1)
            assert work.tensor is not None
            offset = self._place(box, peer, work.tensor.nbytes)
            if offset is None:
                outcome = Outcome(arena.library.wanma_usable(arena.handle, peer, ctypes.byref(cause)))
                if outcome is Outcome.DONE:
                    return
            else:
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
            box.waiting.popleft()
            self._waiting -= 1
            if outcome is Outcome.DONE:
                assert offset is not None
                box.sent += 1
                box.places.append((box.sent, offset, work.tensor.nbytes))
                work.asked.done = True
            else:
                work.error = self._failure(outcome, work.asked, cause.value, self._seconds())
            work.tensor = None

    def _place(self, box: _Outbox, peer: int, size: int) -> int | None:
        """Allocate `size` bytes of the heap; return None if there is no room before others are received."""
        full = bool(box.places) and box.bytes + size > MOST_BYTES
        offset = None if full else self._arena.take(size)
        if offset is None and box.places:
            # Free messages that were received before earlier ones with other tags.
            kept: deque[tuple[int, int, int]] = deque()
            for number, place, held in box.places:
                if self._was_taken(peer, number):
                    self._arena.give_back(place)
                else:
                    kept.append((number, place, held))
            if len(kept) < len(box.places):
                box.places = kept
                return self._place(box, peer, size)
        return offset

    def _was_taken(self, peer: int, number: int) -> bool:
        return bool(self._arena.library.wanma_taken(self._arena.handle, peer, number % 2**32))

    def _send_rest(self) -> None:
        while True:
            seen = self.mail()
            self.push()
            with self._lock:
                if not self._waiting:
                    self._sender = None
                    return
            self.rest(seen)

    def _asked(self, what: str, peer: int) -> Asked:
        self._number += 1
        self._recent.append(Asked(self._number, what, peer, time.time_ns()))
        return self._recent[-1]

    def _text(self, asked: Asked) -> str:
        return self._told.describe(asked.what, asked.number, asked.peer)

    def _seconds(self) -> float:
        try:
            return self._told.seconds()
        except ReferenceError:  # the group is gone, and some thread still waits
            return 0.0

    def _failure(self, outcome: Outcome, asked: Asked, blamed: int, seconds: float) -> SharedMemoryError:
        try:
            return self._told.failure(outcome, self._text(asked), blamed, seconds)
        except ReferenceError:
            return SharedMemoryError(f"{asked.what} #{asked.number}: this rank has closed its process group")
