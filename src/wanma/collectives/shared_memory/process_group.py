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

from wanma.collectives.balanced_owners import assign_balanced_owners
from wanma.collectives.shared_memory.arena import Arena
from wanma.collectives.shared_memory.errors import SharedMemoryError, failure_text
from wanma.collectives.shared_memory.flight_recorder import CollectiveRecord, FlightRecorder
from wanma.collectives.shared_memory.native_calls import (
    all_gather,
    all_reduce,
    all_to_all,
    are_dense_on_cpu,
    barrier,
    broadcast,
    check_gathered_size,
    reduce_scatter,
    select_reduce_operation,
)
from wanma.collectives.shared_memory.native_library import CollectiveStatus, NativeCall
from wanma.collectives.shared_memory.point_to_point import ANY_SOURCE, PointToPoint
from wanma.collectives.shared_memory.work import FutureCompleter, SharedMemoryWork
from wanma.torch_internals.distributed import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    add_older_method_names,
    register_gloo_for_cpu,
    set_default_timeout,
)

_MAX_TIMEOUT_SECONDS = 10 * 365 * 86400.0


@add_older_method_names
class SharedMemoryProcessGroup(dist.ProcessGroup):
    """Process group of ranks on one node, over an arena.

    Args:
        store: store of the group.
        arena: the ranks' shared memory.
        gloo: Gloo group of the same ranks.
        timeout: limit of every collective that has none of its own.
    """

    def __init__(self, store: Any, arena: Arena, gloo: Any, timeout: timedelta) -> None:
        super().__init__(arena.rank, arena.layout.ranks)  # type: ignore[call-arg]  # torch's other one makes no subclass
        self._arena, self._gloo, self._timeout = arena, gloo, timeout
        self._rank, self._ranks = arena.rank, arena.layout.ranks
        self._flight_recorder = FlightRecorder()
        self._point_to_point = PointToPoint(arena, weakref.proxy(self))
        self._future_completer = FutureCompleter()
        self._lock = threading.Lock()
        self._shared_tensor_bytes = 0
        """Bytes of this rank's parts of the common tensors, minus those of the common tensors in its heap."""
        self._in_flight: deque[tuple[int, Any]] = deque()
        """Collectives that may be in flight, as (number, tensors): nothing else keeps the tensors alive."""
        # Methods that are not here are the base class's, which asks the backend of a tensor's device; those
        # that are here pass what they do not do to a group beside this one.
        self._fallback_group = dist.ProcessGroup(store, self._rank, self._ranks)
        for group in (self, self._fallback_group):
            register_gloo_for_cpu(group, gloo)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "shared"

    # ------------------------------------------------------------------ tensors in place

    def allocate_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor (elements,) that collectives of this group use without copies.

        Without room in the heap it is a plain tensor, and collectives give the same result.
        """
        tensor = self._arena.allocate_tensor(elements, dtype)
        return torch.empty(elements, dtype=dtype) if tensor is None else tensor

    def allocate_shared(self, parts: Sequence[tuple[int, torch.dtype]]) -> list[tuple[Tensor, Tensor] | None]:
        """Return tensors shared by all ranks, each with one part for every rank.

        Each rank reads what the others write. Every rank calls this alike, and frees the tensors when the
        others do.

        Args:
            parts: elements and data type of one rank's part, for each tensor.

        Returns:
            For each tensor, uninitialized, the whole (ranks × part,) and this rank's part of it (part,): the
            same memory, which autograd does not track. None if there is no room.
        """
        sizes = [self._ranks * elements * dtype.itemsize for elements, dtype in parts]
        owners = assign_balanced_owners(sizes, self._ranks)
        self.barrier().wait()  # all ranks have freed their earlier tensors
        offsets = torch.full((len(parts),), -1, dtype=torch.int64)
        for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
            if owner == self._rank and (allocated := self._arena.allocate(size)) is not None:
                offsets[index] = allocated
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self.allreduce([offsets], options).wait()
        for size, owner, offset in zip(sizes, owners, offsets.tolist(), strict=True):
            if offset >= 0:
                self._shared_tensor_bytes += size // self._ranks - (size if owner == self._rank else 0)
        return [
            None if offset < 0 else self._arena.shared_views(owner, offset, elements, dtype)
            for (elements, dtype), owner, offset in zip(parts, owners, offsets.tolist(), strict=True)
        ]

    @property
    def allocated_bytes(self) -> int:
        """Most bytes that `allocate` had in use at once, plus this rank's parts of the common tensors.

        The parts count here whichever rank has the common tensor in its heap.
        """
        return self._arena.heap_high_water_bytes + self._shared_tensor_bytes

    # ------------------------------------------------------------------ collectives

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # one form of several
        opts = AllreduceOptions() if opts is None else opts
        operation = select_reduce_operation(opts, tensors)
        if operation is None or len(tensors) != 1:
            return self._fallback_group.allreduce(tensors, opts)
        return self._submit("all_reduce", [all_reduce(tensors[0], operation)], opts, tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        operation = select_reduce_operation(opts, tensors)
        if operation is None or not tensors:
            return self._fallback_group.allreduce_coalesced(tensors, opts)
        calls = [all_reduce(tensor, operation) for tensor in tensors]
        return self._submit("all_reduce_coalesced", calls, opts, tensors, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]  # one form of several
        opts = BroadcastOptions() if opts is None else opts
        if len(tensors) != 1 or not are_dense_on_cpu(tensors) or opts.rootTensor != 0:
            return self._fallback_group.broadcast(tensors, opts)
        (tensor,) = tensors
        return self._submit("broadcast", [broadcast(tensor, opts.rootRank)], opts, tensors, tensors)

    def allgather(  # type: ignore[override]  # one form of several
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> Any:
        opts = AllgatherOptions() if opts is None else opts
        if len(input_tensors) != 1 or len(output_tensors) != 1:
            return self._fallback_group.allgather(output_tensors, input_tensors, opts)
        (outputs,), (input_tensor,) = output_tensors, input_tensors
        are_uniform = all(
            output.dtype == input_tensor.dtype and output.numel() == input_tensor.numel()
            for output in outputs
        )
        if len(outputs) != self._ranks or not are_uniform or not are_dense_on_cpu([input_tensor, *outputs]):
            return self._fallback_group.allgather(output_tensors, input_tensors, opts)
        call = all_gather([output.data_ptr() for output in outputs], input_tensor)
        return self._submit("all_gather", [call], opts, (outputs, input_tensor), [outputs])

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
        inputs = [part.contiguous() for part in inputs]
        for output, part in zip(outputs, inputs, strict=True):
            check_gathered_size("all_gather", output, part, self._ranks)
        calls = [
            all_gather([output.data_ptr() + rank * part.nbytes for rank in range(self._ranks)], part)
            for output, part in zip(outputs, inputs, strict=True)
        ]
        return self._submit(name, calls, opts, (outputs, inputs), outputs)

    def reduce_scatter(  # type: ignore[override]  # one form of several
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> Any:
        opts = ReduceScatterOptions() if opts is None else opts
        if len(output_tensors) != 1 or len(input_tensors) != 1:
            return self._fallback_group.reduce_scatter(output_tensors, input_tensors, opts)
        (output,), (inputs,) = output_tensors, input_tensors
        are_uniform = all(
            tensor.dtype == output.dtype and tensor.numel() == output.numel() for tensor in inputs
        )
        operation = select_reduce_operation(opts, [output, *inputs])
        if operation is None or not are_uniform or len(inputs) != self._ranks:
            return self._fallback_group.reduce_scatter(output_tensors, input_tensors, opts)
        call = reduce_scatter(output, [tensor.data_ptr() for tensor in inputs], None, operation)
        return self._submit("reduce_scatter", [call], opts, (output, inputs), [output])

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
        inputs = [tensor.contiguous() for tensor in inputs]
        operation = select_reduce_operation(opts, [*outputs, *inputs])
        if operation is None:
            raise ValueError(f"reduce_scatter takes contiguous CPU tensors of numbers, not {inputs[0].dtype}")
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_gathered_size("reduce_scatter", tensor, output, self._ranks)
            slices = [tensor.data_ptr() + rank * output.nbytes for rank in range(self._ranks)]
            calls.append(reduce_scatter(output, slices, tensor.data_ptr(), operation))
        return self._submit(name, calls, opts, (outputs, inputs), outputs)

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
        return self._submit("all_to_all", [call], opts, (output, own), [output])

    def barrier(self, opts: Any = None) -> Any:
        opts = BarrierOptions() if opts is None else opts
        return self._submit("barrier", [barrier()], opts, None, [])

    # ------------------------------------------------------------------ messages

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._point_to_point.send(tensor, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._point_to_point.receive(tensor, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        (tensor,) = tensors
        return self._point_to_point.receive(tensor, None, tag)

    def get_timeout_seconds(self) -> float:
        """Return the timeout, in seconds, of a wait that has none of its own."""
        return min(self._timeout.total_seconds(), _MAX_TIMEOUT_SECONDS)

    def describe_message(self, direction: str, number: int, peer: int) -> str:
        """Describe a message: 'recv #3 from rank 1 of group pp'."""
        peer_text = "any rank" if peer == ANY_SOURCE else f"rank {self._global_ranks()[peer]}"
        preposition = "to" if direction == "send" else "from"
        return f"{direction} #{number} {preposition} {peer_text} of group {self._display_name()}"

    def make_error(
        self, status: CollectiveStatus, message: str, faulty_rank: int, seconds: float
    ) -> SharedMemoryError:
        """Return the error of a failed message."""
        global_ranks = self._global_ranks()
        failed_rank = global_ranks[faulty_rank] if 0 <= faulty_rank < self._ranks else None
        return SharedMemoryError(
            failure_text(status, message, failed_rank, [], global_ranks[self._rank], seconds)
        )

    # ------------------------------------------------------------------ what torch and the supervisor ask

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        set_default_timeout(self._gloo, timeout)

    def shutdown(self) -> None:
        """Leave the group: peers that wait for this rank fail at once."""
        self._arena.close()
        self._future_completer.close()
        super().shutdown()
        with self._lock:
            self._in_flight.clear()

    def abort(self) -> None:
        """End the collectives in flight, on all ranks."""
        self._arena.library.wanma_abort(self._arena.handle)

    def read_flight_records(self) -> tuple[list[CollectiveRecord], list[CollectiveRecord]]:
        """Return the collectives and messages that have ended, and those in flight; each oldest first."""
        records = self._flight_recorder.partition(self._arena.library.wanma_done(self._arena.handle))
        completed, in_flight = (
            sorted([*collectives, *messages], key=attrgetter("enqueued_unix_nanoseconds"))
            for collectives, messages in zip(records, self._point_to_point.read_flight_records(), strict=True)
        )
        return completed, in_flight

    # ------------------------------------------------------------------ one collective

    def _submit(
        self, name: str, calls: list[NativeCall], opts: Any, tensors: Any, outputs: list[Any]
    ) -> SharedMemoryWork:
        """Submit the calls and return a handle, which is complete when the last of them is."""
        arena, library = self._arena, self._arena.library
        seconds = opts.timeout.total_seconds()
        if seconds <= 0:
            seconds = self._timeout.total_seconds()
        background = bool(getattr(opts, "asyncOp", True))
        number = 0
        for call in calls:
            call.timeout_nanoseconds = int(min(seconds, _MAX_TIMEOUT_SECONDS) * 1e9)
            number = library.wanma_submit(arena.handle, ctypes.byref(call), background)
            self._flight_recorder.add(number, name, self._display_name())
        with self._lock:
            self._in_flight.append((number, tensors))
        work = SharedMemoryWork(
            self._make_wait_function(name, number, seconds),
            lambda: bool(library.wanma_done(arena.handle) >= number),
            outputs,
            self._future_completer,
        )
        if not background:
            work.wait()
        return work

    def _make_wait_function(self, name: str, number: int, seconds: float) -> Callable[[int], None]:
        arena = self._arena

        def wait(nanoseconds: int) -> None:
            outcome = CollectiveStatus(arena.library.wanma_wait(arena.handle, number, nanoseconds))
            self._release_completed()
            if outcome is CollectiveStatus.DONE:
                return
            waited_seconds = nanoseconds / 1e9 if outcome is CollectiveStatus.IN_PROGRESS else seconds
            raise self._make_collective_error(outcome, name, number, waited_seconds)

        return wait

    def _make_collective_error(
        self, status: CollectiveStatus, name: str, number: int, seconds: float
    ) -> SharedMemoryError:
        arena = self._arena
        missing = (ctypes.c_uint8 * self._ranks)()
        failed_index = arena.library.wanma_cause(arena.handle, missing)
        global_ranks = self._global_ranks()
        missing_ranks = [global_ranks[rank] for rank in range(self._ranks) if missing[rank]]
        description = f"{name} #{number} of group {self._display_name()}"
        failed_rank = global_ranks[failed_index] if 0 <= failed_index < self._ranks else None
        return SharedMemoryError(
            failure_text(status, description, failed_rank, missing_ranks, global_ranks[self._rank], seconds)
        )

    def _release_completed(self) -> None:
        completed_number = self._arena.library.wanma_done(self._arena.handle)
        with self._lock:
            while self._in_flight and self._in_flight[0][0] <= completed_number:
                self._in_flight.popleft()

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

    def _display_name(self) -> str:
        description: str = self.group_desc
        return self.group_name if description in ("", "undefined") else description
