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

from torch import Tensor
from torch.futures import Future

from wanma.collectives.shared_memory.arena import Arena
from wanma.collectives.shared_memory.errors import SharedMemoryError
from wanma.collectives.shared_memory.flight_recorder import MAX_RECORDS, CollectiveRecord
from wanma.collectives.shared_memory.native_calls import are_dense_on_cpu
from wanma.collectives.shared_memory.native_library import CollectiveStatus
from wanma.torch_internals.distributed import AsyncCollectiveTensor, ReceiveWork

ANY_SOURCE = -1
"""Source rank of a message from any rank."""
MAX_QUEUED_BYTES = 1 << 28
"""Most bytes of messages to one rank that it has not received; later ones wait.

A single larger message passes. A channel takes 1,024 messages (native/arena.hpp), counted from the oldest
that was not received.
"""
_SEND_RETRY_SECONDS = 1e-3
"""Time, in seconds, between two attempts to send messages that wait for room."""


class GroupContext(Protocol):
    """Group that messages belong to: its timeout, names and errors."""

    def get_timeout_seconds(self) -> float:
        """Return the timeout, in seconds, of a wait that has none of its own."""

    def describe_message(self, direction: str, number: int, peer: int) -> str:
        """Describe a message: 'recv #3 from rank 1 of group pp'."""

    def make_error(
        self, status: CollectiveStatus, message: str, faulty_rank: int, seconds: float
    ) -> SharedMemoryError:
        """Return the error to raise for a failed message."""


@dataclass
class MessageRecord:
    """Record of one message for the hang report; without its tensor, which is not to live as long."""

    number: int
    direction: str
    """Direction: 'send' or 'recv'."""
    peer: int
    unix_nanoseconds: int
    """Time of the call, or of the last wait for it, in nanoseconds since 1970."""
    waiting_threads: int = 0
    """Number of threads that wait for it now."""
    done: bool = False


class MessageWork(ReceiveWork):
    """Handle of one message, as torch's callers wait for it."""

    def __init__(self, messages: PointToPoint, record: MessageRecord, tag: int, tensor: Tensor) -> None:
        super().__init__()
        self._messages, self.record, self.tag = messages, record, tag
        self.tensor: Tensor | None = tensor
        """Tensor to send or to receive into; a message that was sent keeps it no longer."""
        self.error: SharedMemoryError | None = None
        self._future: Future[Any] | None = None

    @property
    def done(self) -> bool:
        return self.record.done

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Wait until the message is complete or the time is over; 0 seconds: only do what needs no wait.

        Raises:
            SharedMemoryError: it will not complete.
        """

    def advance_or_record_error(self, seconds: float) -> None:
        """Call `advance`; keep the error as well as raise it."""
        try:
            if self.error is not None:
                raise self.error
            self.advance(seconds)
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
                self.advance_or_record_error(0.0)
        return self.done or self.error is not None

    def is_success(self) -> bool:
        return self.is_completed() and self.error is None

    def exception(self) -> Exception | None:
        return self.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return [] if self.tensor is None else [self.tensor]

    def source_rank(self) -> int:
        return self.record.peer

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


class _Send(MessageWork):
    def advance(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.done:
            activity = self._messages.read_activity_counter()
            self._messages.send_queued()
            if self.error is not None:
                raise self.error
            if self.done or time.monotonic() >= deadline:
                return
            self._messages.wait_for_activity(activity)


class _Receive(MessageWork):
    queue: _ReceiveQueue

    def advance(self, seconds: float) -> None:
        deadline, line = time.monotonic() + seconds, self.queue
        if not line.lock.acquire(timeout=max(seconds, 0.0)):
            return
        try:
            while not self.done:
                left = max(deadline - time.monotonic(), 0.0)
                if self._messages.try_receive(line.pending[0], left):
                    line.pending.popleft()
                elif left == 0.0:
                    return
        finally:
            line.lock.release()
        self._messages.remove_idle_queue(line)


class _ReceiveQueue:
    """Queue of pending receives from one source with one tag; the holder of the lock does the first."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.pending: deque[_Receive] = deque()


class _SendQueue:
    """Queue of messages to one rank."""

    def __init__(self) -> None:
        self.sent = 0
        self.unreceived: deque[tuple[int, int, int]] = deque()
        """Messages that may not have been received, as (number, offset in the heap, bytes)."""
        self.queued: deque[_Send] = deque()
        """Messages that wait for room."""

    @property
    def unreceived_bytes(self) -> int:
        return sum(size for _, _, size in self.unreceived)


class PointToPoint:
    """Point-to-point messages of one rank in one group."""

    def __init__(self, arena: Arena, group: GroupContext) -> None:
        self._arena, self._group = arena, group
        self._lock = threading.Lock()
        self._send_queues = [_SendQueue() for _ in range(arena.layout.ranks)]
        self._queued_count = 0
        """Number of messages that wait for room."""
        self._sender: threading.Thread | None = None
        """Thread that sends messages waiting for room, while there are any: callers may be elsewhere."""
        self._receive_queues: dict[tuple[int, int], _ReceiveQueue] = {}
        self._recent: deque[MessageRecord] = deque(maxlen=MAX_RECORDS)
        self._number = 0

    def send(self, tensor: Tensor, peer: int, tag: int) -> MessageWork:
        """Send a tensor and return its handle at once.

        Raises:
            ValueError: there is no such rank or tag, or the tensor is not contiguous in this host's memory.
            SharedMemoryError: the rank is gone.
        """
        tensor = self._checked("send", tensor, peer, tag)
        if tensor.nbytes > self._arena.layout.heap_bytes:
            raise ValueError(f"send: {tensor.nbytes} bytes exceed a rank's part of the shared memory")
        with self._lock:
            work = _Send(self, self._new_record("send", peer), tag, tensor)
            self._send_queues[peer].queued.append(work)
            self._queued_count += 1
            self._send_queued_to(peer)
            if self._queued_count and self._sender is None:
                self._sender = threading.Thread(
                    target=self._send_queued_loop, name="wanma-messages", daemon=True
                )
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
        peer = ANY_SOURCE if peer is None else peer
        with self._lock:
            work = _Receive(self, self._new_record("recv", peer), tag, tensor)
            work.queue = self._receive_queues.setdefault((peer, tag), _ReceiveQueue((peer, tag)))
            work.queue.pending.append(work)
        return work

    def read_flight_records(self) -> tuple[list[CollectiveRecord], list[CollectiveRecord]]:
        """Return the messages that have ended, and those that a thread waits for, each oldest first."""
        completed: list[CollectiveRecord] = []
        in_flight: list[CollectiveRecord] = []
        for message in list(self._recent):
            entry = CollectiveRecord(message.unix_nanoseconds, message.number, self._describe(message))
            if message.done:
                completed.append(entry)
            elif message.waiting_threads:
                in_flight.append(entry)
        return completed, in_flight

    # ------------------------------------------------------------------ what works ask for

    def wait(self, work: MessageWork, seconds: float) -> None:
        message, has_timeout = work.record, seconds > 0
        message.waiting_threads, message.unix_nanoseconds = message.waiting_threads + 1, time.time_ns()
        try:
            seconds = seconds or self._timeout_seconds()
            work.advance_or_record_error(seconds)
            if work.done:
                return
            if has_timeout:
                raise self._make_error(CollectiveStatus.IN_PROGRESS, message, message.peer, seconds)
            self._arena.library.wanma_give_up(self._arena.handle, CollectiveStatus.TIMED_OUT, message.peer)
            work.error = self._make_error(CollectiveStatus.TIMED_OUT, message, message.peer, seconds)
            raise work.error
        finally:
            message.waiting_threads -= 1

    def read_activity_counter(self) -> int:
        """Return a number that changes whenever a message is sent to this rank or received from it."""
        return int(self._arena.library.wanma_mail(self._arena.handle))

    def wait_for_activity(self, counter: int) -> None:
        """Wait until `read_activity_counter` differs from `counter`, for a short time at most."""
        self._arena.library.wanma_rest(self._arena.handle, counter, int(_SEND_RETRY_SECONDS * 1e9))

    def send_queued(self) -> None:
        """Send the messages that waited for room."""
        if self._queued_count:
            with self._lock:
                for peer in range(len(self._send_queues)):
                    self._send_queued_to(peer)

    def try_receive(self, work: _Receive, seconds: float) -> bool:
        """Receive into the tensor of `work`, in at most `seconds`; return True if it is complete."""
        arena, tensor = self._arena, work.tensor
        assert tensor is not None
        faulty_rank, source = ctypes.c_int(-1), ctypes.c_int(work.record.peer)
        outcome = CollectiveStatus(
            arena.library.wanma_receive(
                arena.handle,
                ctypes.byref(source),
                work.tag,
                tensor.data_ptr(),
                tensor.nbytes,
                int(seconds * 1e9),
                ctypes.byref(faulty_rank),
            )
        )
        if outcome is CollectiveStatus.IN_PROGRESS:
            return False
        if outcome is not CollectiveStatus.DONE:
            if outcome is CollectiveStatus.MISMATCH:
                arena.library.wanma_give_up(arena.handle, outcome, faulty_rank.value)
            raise self._make_error(outcome, work.record, faulty_rank.value, self._timeout_seconds())
        work.record.peer, work.record.done = source.value, True
        return True

    def remove_idle_queue(self, queue: _ReceiveQueue) -> None:
        """Delete a queue without receives: tags may be many."""
        with self._lock:
            if not queue.pending and self._receive_queues.get(queue.key) is queue:
                del self._receive_queues[queue.key]

    # ------------------------------------------------------------------ inside

    def _checked(self, direction: str, tensor: Tensor, peer: int, tag: int) -> Tensor:
        if not 0 <= peer < self._arena.layout.ranks:
            raise ValueError(f"{direction}: there is no rank {peer} in a group of {self._arena.layout.ranks}")
        if not 0 <= tag < 1 << 31:
            raise ValueError(f"{direction}: the tag must be from 0 to 2^31 - 1, not {tag}")
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.trigger_wait()
        if not are_dense_on_cpu([tensor]):
            raise ValueError(f"{direction} takes a contiguous CPU tensor")
        return tensor

    def _send_queued_to(self, peer: int) -> None:
        """Send the messages to `peer` that have room; the caller holds the lock."""
        arena, send_queue = self._arena, self._send_queues[peer]
        while send_queue.unreceived and self._is_received(peer, send_queue.unreceived[0][0]):
            arena.free(send_queue.unreceived.popleft()[1])
        while send_queue.queued:
            work, faulty_rank = send_queue.queued[0], ctypes.c_int(-1)
            assert work.tensor is not None
            offset = self._allocate_message(send_queue, peer, work.tensor.nbytes)
            if offset is None:
                outcome = CollectiveStatus(
                    arena.library.wanma_usable(arena.handle, peer, ctypes.byref(faulty_rank))
                )
                if outcome is CollectiveStatus.DONE:
                    return
            else:
                outcome = CollectiveStatus(
                    arena.library.wanma_send(
                        arena.handle,
                        peer,
                        work.tag,
                        work.tensor.data_ptr(),
                        work.tensor.nbytes,
                        offset,
                        ctypes.byref(faulty_rank),
                    )
                )
                if outcome is not CollectiveStatus.DONE:
                    arena.free(offset)
                    if outcome is CollectiveStatus.IN_PROGRESS:
                        return
            send_queue.queued.popleft()
            self._queued_count -= 1
            if outcome is CollectiveStatus.DONE:
                assert offset is not None
                send_queue.sent += 1
                send_queue.unreceived.append((send_queue.sent, offset, work.tensor.nbytes))
                work.record.done = True
            else:
                work.error = self._make_error(
                    outcome, work.record, faulty_rank.value, self._timeout_seconds()
                )
            work.tensor = None

    def _allocate_message(self, send_queue: _SendQueue, peer: int, size: int) -> int | None:
        """Allocate `size` bytes of the heap; return None if there is no room before others are received."""
        full = bool(send_queue.unreceived) and send_queue.unreceived_bytes + size > MAX_QUEUED_BYTES
        offset = None if full else self._arena.allocate(size)
        if offset is None and send_queue.unreceived:
            # Free messages that were received before earlier ones with other tags.
            unreceived: deque[tuple[int, int, int]] = deque()
            for number, address, message_bytes in send_queue.unreceived:
                if self._is_received(peer, number):
                    self._arena.free(address)
                else:
                    unreceived.append((number, address, message_bytes))
            if len(unreceived) < len(send_queue.unreceived):
                send_queue.unreceived = unreceived
                return self._allocate_message(send_queue, peer, size)
        return offset

    def _is_received(self, peer: int, number: int) -> bool:
        return bool(self._arena.library.wanma_taken(self._arena.handle, peer, number % 2**32))

    def _send_queued_loop(self) -> None:
        while True:
            activity = self.read_activity_counter()
            self.send_queued()
            with self._lock:
                if not self._queued_count:
                    self._sender = None
                    return
            self.wait_for_activity(activity)

    def _new_record(self, direction: str, peer: int) -> MessageRecord:
        self._number += 1
        self._recent.append(MessageRecord(self._number, direction, peer, time.time_ns()))
        return self._recent[-1]

    def _describe(self, record: MessageRecord) -> str:
        return self._group.describe_message(record.direction, record.number, record.peer)

    def _timeout_seconds(self) -> float:
        try:
            return self._group.get_timeout_seconds()
        except ReferenceError:  # the group is gone, and some thread still waits
            return 0.0

    def _make_error(
        self, status: CollectiveStatus, record: MessageRecord, faulty_rank: int, seconds: float
    ) -> SharedMemoryError:
        try:
            return self._group.make_error(status, self._describe(record), faulty_rank, seconds)
        except ReferenceError:
            return SharedMemoryError(
                f"{record.direction} #{record.number}: this rank has closed its process group"
            )
