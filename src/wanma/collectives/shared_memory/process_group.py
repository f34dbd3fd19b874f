"""Process group of torch's whose collectives go over shared memory.

It has Gloo's operations, with the same meaning; those it does not do itself (gathers to one rank, sparse and
strided tensors) go to a Gloo group inside it. Sums are taken in rank order on every rank, in fp32 for types
of 16 bits, and rounded once.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from wanma.collectives.balanced_owners import shared_out
from wanma.collectives.shared_memory.arena import Arena
from wanma.collectives.shared_memory.errors import SharedMemoryError, failure_text
from wanma.collectives.shared_memory.flight_recorder import Entry, Record
from wanma.collectives.shared_memory.native_calls import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    check_whole,
    operation_of,
    plain,
    reduce_scatter,
)
from wanma.collectives.shared_memory.native_library import Call, Outcome
from wanma.collectives.shared_memory.point_to_point import ANYBODY, Messages
from wanma.collectives.shared_memory.work import Completions, SharedWork

_LONGEST_SECONDS = 10 * 365 * 86400.0


class SharedGroup(dist.ProcessGroup):
    """Process group of ranks on one node, over an arena.

    Args:
        store: store of the group.
        arena: the ranks' shared memory.
        gloo: Gloo group of the same ranks.
        timeout: limit of every collective that has none of its own.
        host_ranks: ranks of this group on each host; a group is on one host so far.
    """

    def __init__(
        self,
        store: Any,
        arena: Arena,
        gloo: Any,
        timeout: timedelta,
        host_ranks: tuple[tuple[int, ...], ...],
    ) -> None:
        super().__init__(arena.rank, arena.shape.ranks)  # type: ignore[call-arg]  # torch's other one makes no subclass
        self._arena, self._gloo, self._timeout = arena, gloo, timeout
        self._me, self._ranks = arena.rank, arena.shape.ranks
        self.hosts = host_ranks
        self._record, self._messages = Record(), Messages(arena, weakref.proxy(self))
        self._completions = Completions()
        self._lock = threading.Lock()
        self._common_bytes = 0
        """Bytes of this rank's parts of the common tensors, minus those of the common tensors in its heap."""
        self._held: deque[tuple[int, Any]] = deque()
        """Collectives that may be in flight, as (number, tensors): nothing else keeps the tensors alive."""
        # Methods that are not here are the base class's, which asks the backend of a tensor's device; those
        # that are here pass what they do not do to a group beside this one.
        self._others = dist.ProcessGroup(store, self._me, self._ranks)
        for group in (self, self._others):
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "shared"

    # ------------------------------------------------------------------ tensors in place

    def allocate(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor (elements,) that collectives of this group use without copies.

        Without room in the heap it is a plain tensor, and collectives give the same result.
        """
        found = self._arena.tensor(elements, dtype)
        return torch.empty(elements, dtype=dtype) if found is None else found

    def allocate_common(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[tuple[Tensor, Tensor] | None]:
        """Return tensors shared by all ranks, each with one part for every rank.

        Each rank reads what the others write. Every rank calls this alike, and frees the tensors when the
        others do.

        Args:
            parts: elements and data type of one rank's part, for each tensor.

        Returns:
            For each tensor, uninitialised, the whole (ranks × part,) and this rank's part of it (part,): the
            same memory, which autograd does not track. None if there is no room.
        """
        bytes_of = [self._ranks * elements * dtype.itemsize for elements, dtype in parts]
        owners = shared_out(bytes_of, self._ranks)
        self.barrier().wait()  # all ranks have freed their earlier tensors
        places = torch.full((len(parts),), -1, dtype=torch.int64)
        for index, (size, owner) in enumerate(zip(bytes_of, owners, strict=True)):
            if owner == self._me and (offset := self._arena.take(size)) is not None:
                places[index] = offset
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.allreduce([places], options).wait()
        for size, owner, place in zip(bytes_of, owners, places.tolist(), strict=True):
            if place >= 0:
                self._common_bytes += size // self._ranks - (size if owner == self._me else 0)
        return [
            None if place < 0 else self._arena.common(owner, place, elements, dtype)
            for (elements, dtype), owner, place in zip(parts, owners, places.tolist(), strict=True)
        ]

    @property
    def allocated_bytes(self) -> int:
        """Most bytes that `allocate` had in use at once, plus this rank's parts of the common tensors.

        The parts count here whichever rank has the common tensor in its heap.
        """
        return self._arena.heap_bytes + self._common_bytes

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # one form of several
        opts = AllreduceOptions() if opts is None else opts
        operation = operation_of(opts, tensors)
        if operation is None or len(tensors) != 1:
            return self._others.allreduce(tensors, opts)
        return self._run("all_reduce", [all_reduce(tensors[0], operation)], opts, tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        operation = operation_of(opts, tensors)
        if operation is None or not tensors:
            return self._others.allreduce_coalesced(tensors, opts)
        calls = [all_reduce(tensor, operation) for tensor in tensors]
        return self._run("all_reduce_coalesced", calls, opts, tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # one form of several
        opts = BroadcastOptions() if opts is None else opts
        if len(tensors) != 1 or not plain(tensors) or opts.rootTensor != 0:
            return self._others.broadcast(tensors, opts)
        (tensor,) = tensors
        return self._run("broadcast", [broadcast(tensor, opts.rootRank)], opts, tensors, tensors)

    def allgather(  # type: ignore[override]  # one form of several
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if len(input_tensors) != 1 or len(output_tensors) != 1:
            return self._others.allgather(output_tensors, input_tensors, opts)
        (outputs,), (own,) = output_tensors, input_tensors
        alike = all(output.dtype == own.dtype and output.numel() == own.numel() for output in outputs)
        if len(outputs) != self._ranks or not alike or not plain([own, *outputs]):
            return self._others.allgather(output_tensors, input_tensors, opts)
        call = all_gather([output.data_ptr() for output in outputs], own)
        return self._run("all_gather", [call], opts, (outputs, own), [outputs])

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [own], opts, "all_gather_single")

    def all_gather_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,
        name: str = "all_gather_coalesced",
    ) -> Any:
        """All-gather `inputs` (part, ...) into `outputs` (ranks × part, ...)."""
        opts = AllgatherOptions() if opts is None else opts
        inputs = [own.contiguous() for own in inputs]
        for output, own in zip(outputs, inputs, strict=True):
            check_whole("all_gather", output, own, self._ranks)
        calls = [
            all_gather([output.data_ptr() + rank * own.nbytes for rank in range(self._ranks)], own)
            for output, own in zip(outputs, inputs, strict=True)
        ]
        return self._run(name, calls, opts, (outputs, inputs), outputs)

    def reduce_scatter(  # type: ignore[override]  # one form of several
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> Any:
        opts = ReduceScatterOptions() if opts is None else opts
        if len(output_tensors) != 1 or len(input_tensors) != 1:
            return self._others.reduce_scatter(output_tensors, input_tensors, opts)
        (output,), (inputs,) = output_tensors, input_tensors
        alike = all(one.dtype == output.dtype and one.numel() == output.numel() for one in inputs)
        operation = operation_of(opts, [output, *inputs])
        if operation is None or not alike or len(inputs) != self._ranks:
            return self._others.reduce_scatter(output_tensors, input_tensors, opts)
        call = reduce_scatter(output, [one.data_ptr() for one in inputs], None, operation)
        return self._run("reduce_scatter", [call], opts, (output, inputs), [output])

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [whole], opts, "reduce_scatter_single")

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any = None,
        name: str = "reduce_scatter_coalesced",
    ) -> Any:
        """Write the sums of the ranks' slices of `inputs` (ranks × part, ...) to `outputs` (part, ...)."""
        opts = ReduceScatterOptions() if opts is None else opts
        inputs = [whole.contiguous() for whole in inputs]
        operation = operation_of(opts, [*outputs, *inputs])
        if operation is None:
            raise ValueError(f"reduce_scatter takes contiguous CPU tensors of numbers, not {inputs[0].dtype}")
        calls = []
        for output, whole in zip(outputs, inputs, strict=True):
            check_whole("reduce_scatter", whole, output, self._ranks)
            slices = [whole.data_ptr() + rank * output.nbytes for rank in range(self._ranks)]
            calls.append(reduce_scatter(output, slices, whole.data_ptr(), operation))
        return self._run(name, calls, opts, (outputs, inputs), outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        own: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Any:
        """Send rows of `own` to each rank, and receive rows from each in `output`.

        `input_sizes` and `output_sizes` count the rows by rank; equal shares by default.
        """
        opts = AllToAllOptions() if opts is None else opts
        own = own.contiguous()
        call = all_to_all(output, own, output_sizes, input_sizes, self._ranks)
        return self._run("all_to_all", [call], opts, (output, own), [output])

    def barrier(self, opts: Any = None) -> Any:
        opts = BarrierOptions() if opts is None else opts
        return self._run("barrier", [barrier()], opts, None, [])

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._messages.send(tensor, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._messages.receive(tensor, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._messages.receive(tensor, None, tag)

    def seconds(self) -> float:
        """Return the timeout, in seconds, of a wait that has none of its own."""
        return min(self._timeout.total_seconds(), _LONGEST_SECONDS)

    def describe(self, what: str, number: int, peer: int) -> str:
        """Describe a message: 'recv #3 from rank 1 of group pp'."""
        whom = "any rank" if peer == ANYBODY else f"rank {self._global_ranks()[peer]}"
        return f"{what} #{number} {'to' if what == 'send' else 'from'} {whom} of group {self._described()}"

    def failure(self, outcome: Outcome, what: str, blamed: int, seconds: float) -> SharedMemoryError:
        """Return the error of a failed message."""
        named = self._global_ranks()
        guilty = named[blamed] if 0 <= blamed < self._ranks else None
        return SharedMemoryError(failure_text(outcome, what, guilty, [], named[self._me], seconds))

    # Torch's earlier names of these methods.
    _allgather_base = all_gather_single  # type: ignore[assignment]  # names of arguments
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # names of arguments
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # names of arguments
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # names of arguments
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # names of arguments

    # ------------------------------------------------------------------ what torch and the supervisor ask

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group: peers that wait for this rank fail at once."""
        self._arena.close()
        self._completions.close()
        super().shutdown()
        with self._lock:
            self._held.clear()

    def abort(self) -> None:
        """End the collectives in flight, on all ranks."""
        self._arena.library.wanma_abort(self._arena.handle)

    def standing(self) -> tuple[list[Entry], list[Entry]]:
        """Return the collectives and messages that have ended, and those in flight; each oldest first."""
        collectives = self._record.split(self._arena.library.wanma_done(self._arena.handle))
        ended, under_way = (
            sorted([*ours, *messages], key=attrgetter("asked_nanoseconds"))
            for ours, messages in zip(collectives, self._messages.standing(), strict=True)
        )
        return ended, under_way

    # ------------------------------------------------------------------ one collective

    def _run(self, name: str, calls: list[Call], opts: Any, tensors: Any, outputs: list[Any]) -> SharedWork:
        """Submit the calls and return a handle, which is complete when the last of them is."""
        arena, library = self._arena, self._arena.library
        seconds = opts.timeout.total_seconds()
        if seconds <= 0:
            seconds = self._timeout.total_seconds()
        background = bool(getattr(opts, "asyncOp", True))
        number = 0
        for call in calls:
            call.timeout_nanoseconds = int(min(seconds, _LONGEST_SECONDS) * 1e9)
            number = library.wanma_submit(arena.handle, ctypes.byref(call), background)
            self._record.add(number, name, self._described())
        with self._lock:
            self._held.append((number, tensors))
        work = SharedWork(
            self._waiting(name, number, seconds),
            lambda: bool(library.wanma_done(arena.handle) >= number),
            outputs,
            self._completions,
        )
        if not background:
            work.wait()
        return work

    def _waiting(self, name: str, number: int, seconds: float) -> Callable[[int], None]:
        arena = self._arena

        def wait(nanoseconds: int) -> None:
            outcome = Outcome(arena.library.wanma_wait(arena.handle, number, nanoseconds))
            self._forget_done()
            if outcome is Outcome.DONE:
                return
            waited = nanoseconds / 1e9 if outcome is Outcome.UNDER_WAY else seconds
            raise self._failure(outcome, name, number, waited)

        return wait

    def _failure(self, outcome: Outcome, name: str, number: int, seconds: float) -> SharedMemoryError:
        arena = self._arena
        missing = (ctypes.c_uint8 * self._ranks)()
        cause = arena.library.wanma_cause(arena.handle, missing)
        named = self._global_ranks()
        late = [named[rank] for rank in range(self._ranks) if missing[rank]]
        what = f"{name} #{number} of group {self._described()}"
        blamed = named[cause] if 0 <= cause < self._ranks else None
        return SharedMemoryError(failure_text(outcome, what, blamed, late, named[self._me], seconds))

    def _forget_done(self) -> None:
        done = self._arena.library.wanma_done(self._arena.handle)
        with self._lock:
            while self._held and self._held[0][0] <= done:
                self._held.popleft()

    def _global_ranks(self) -> list[int]:
        """Return the global ranks of this group's ranks."""
        try:
            return dist.get_process_group_ranks(self)
        except (
            KeyError,
            ValueError,
            RuntimeError,
        ):  # torch does not know the group: it is being made, or gone
            return list(range(self._ranks))

    def _described(self) -> str:
        described: str = self.group_desc
        return self.group_name if described in ("", "undefined") else described
