"""Backend of `torch.distributed` that makes process groups over shared memory.

Ranks that meet in a group tell each other, through the group's store, their host and their abilities. On one
host they share an arena; otherwise, or if one of them cannot, the group is Gloo's.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, unlisted

from wanma.collectives.shared_memory.arena import (
    CHUNK_BYTES,
    OVERSUBSCRIBED_SPIN_SECONDS,
    SPIN_SECONDS,
    Arena,
    ArenaLayout,
    compute_default_heap_bytes,
    create_arena_file,
)
from wanma.collectives.shared_memory.native_library import MAX_RANKS
from wanma.collectives.shared_memory.process_group import SharedMemoryProcessGroup
from wanma.job.errors import WanmaError
from wanma.torch_internals.distributed import is_backend_registered, start_sequence_numbers
from wanma.torch_internals.loaded import process_groups

GLOO_FALLBACK_HINT = "set parallel.collectives to 'auto', which falls back to Gloo, or to 'gloo'"


@dataclass(frozen=True)
class SharedMemoryOptions:
    """Configuration of the backend in this process."""

    library: Path | None
    """Compiled C++ library; None: there is none."""
    unavailable_reason: str = ""
    """Reason for a missing library; empty otherwise."""
    is_required: bool = False
    """True if a group without shared memory is an error."""
    local_world_size: int = 1
    """Number of the run's ranks on this host."""


@dataclass(frozen=True)
class _RankCapability:
    """Facts that a rank tells the other ranks of a group."""

    host: str
    process: int
    reason: str
    """Obstacle to sharing memory; empty if there is none."""


def register_backend(options: SharedMemoryOptions) -> str:
    """Register a backend and return its name for `init_process_group` and `new_group`."""
    name = "shared_or_error" if options.is_required else "shared"
    _options_by_backend[name] = options
    if not is_backend_registered(name):
        dist.Backend.register_backend(name, _make_group_factory(name), extended_api=True, devices=["cpu"])
    return name


_options_by_backend: dict[str, SharedMemoryOptions] = {}
"""Configuration of each backend by its name, kept for the process, as torch keeps its backends."""


def as_shared_memory_group(group: dist.ProcessGroup | None) -> SharedMemoryProcessGroup | None:
    """Return `group`, or the world's if None, as a shared-memory group; None if it is another."""
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, SharedMemoryProcessGroup) else None


def allocated_bytes() -> int:
    """Return the largest memory, in bytes, that this process's groups held for its own tensors."""
    groups = (group for group in process_groups() if isinstance(group, SharedMemoryProcessGroup))
    return sum(group.allocated_bytes for group in groups)


def get_fallback_reason(group: dist.ProcessGroup) -> str:
    """Return the reason why `group`, made by this backend, is Gloo's; empty for other groups."""
    return (
        ""
        if isinstance(group, SharedMemoryProcessGroup)
        else _fallback_reasons.get(str(group.group_name), "")
    )


_fallback_reasons: dict[str, str] = {}
"""Reasons for Gloo, by the name of the group."""


def _make_group_factory(name: str) -> Callable[[Any, Any], Any]:
    def create_group(options: Any, _: Any) -> Any:
        return _create_group(options, _options_by_backend[name])

    return create_group


def _create_group(options: Any, shared_memory_options: SharedMemoryOptions) -> Any:
    """Create the process group of a rank; every rank of the group calls it."""
    store, rank, ranks = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    start_sequence_numbers(gloo)
    if ranks == 1:
        return gloo
    # The same store may have seen a group of this name before, whose messages are not for this one.
    group_store = PrefixStore(f"shared/{store.add(f'shared/{rank}', 1)}", store)
    members = _exchange_through_store(
        group_store,
        "member",
        rank,
        ranks,
        asdict(_RankCapability(host_id(), os.getpid(), shared_memory_options.unavailable_reason)),
    )
    capabilities = [_RankCapability(**member) for member in members]
    reason = _find_incompatibility(capabilities)
    arena = None
    if not reason:
        arena, reason = _create_arena(group_store, shared_memory_options, rank, capabilities)
    if arena is None:
        if shared_memory_options.is_required:
            raise WanmaError(
                f"parallel.collectives = 'shared_memory' is not available: {reason}", GLOO_FALLBACK_HINT
            )
        _fallback_reasons[str(options.group_id)] = reason
        return gloo
    return SharedMemoryProcessGroup(store, arena, gloo, options.timeout)


def _find_incompatibility(members: Sequence[_RankCapability]) -> str:
    """Return the obstacle to sharing memory among these ranks; empty if there is none."""
    for rank, member in enumerate(members):
        if member.reason:
            return f"rank {rank}: {member.reason}" if len({m.reason for m in members}) > 1 else member.reason
    hosts = len({member.host for member in members})
    if hosts > 1:
        return f"the {len(members)} ranks are on {hosts} nodes"
    if len(members) > MAX_RANKS:
        return f"{len(members)} ranks exceed the maximum of {MAX_RANKS}"
    return ""


def _create_arena(
    store: Any, options: SharedMemoryOptions, rank: int, members: Sequence[_RankCapability]
) -> tuple[Arena | None, str]:
    """Create and map the arena of all ranks, or return the obstacle: the same on every rank."""
    assert options.library is not None  # without one there is a reason
    ranks = len(members)
    is_oversubscribed = max(ranks, options.local_world_size) > len(os.sched_getaffinity(0))
    spin = OVERSUBSCRIBED_SPIN_SECONDS if is_oversubscribed else SPIN_SECONDS
    shape = ArenaLayout(ranks, CHUNK_BYTES, compute_default_heap_bytes(ranks), spin)
    created_descriptor, arena, problem = -1, None, ""
    try:
        if rank == 0:
            try:
                created_descriptor = create_arena_file(options.library, shape)
            finally:
                store.set("arena", str(created_descriptor))
            descriptor = created_descriptor
        else:
            remote_descriptor = int(store.get("arena"))
            if remote_descriptor < 0:
                raise OSError(None, "rank 0 could not create it")
            descriptor = os.open(
                f"/proc/{members[0].process}/fd/{remote_descriptor}", os.O_RDWR | os.O_CLOEXEC
            )
        try:
            arena = Arena(options.library, shape, descriptor, rank, [member.process for member in members])
        finally:
            if rank != 0:
                os.close(descriptor)
    except OSError as error:
        problem = f"rank {rank} cannot map the shared memory: {error.strerror or error}"
    # The first rank's descriptor may close only now, when all ranks have opened it or have failed to.
    problems = _exchange_through_store(store, "mapped", rank, ranks, problem)
    if created_descriptor >= 0:
        os.close(created_descriptor)
    reason = next((text for text in problems if text), "")
    return (None if reason else arena), reason


def _exchange_through_store(store: Any, key: str, rank: int, ranks: int, value: Any) -> list[Any]:
    """Publish a value and return every rank's value, by rank."""
    store.set(f"{key}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{peer}")) for peer in range(ranks)]


def host_id() -> str:
    """Return an id that is equal in processes that can share memory and notice each other's end.

    They reach each other's files, too: they belong to one user and one boot of one node, and to the same
    namespaces of processes and of the network: a user who emulates several nodes on one wants them to talk
    over the network.
    """
    parts = [str(os.getuid())]
    for path in ("/proc/self/ns/pid", "/proc/self/ns/net"):
        with contextlib.suppress(OSError):
            parts.append(str(Path(path).readlink()))
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)
