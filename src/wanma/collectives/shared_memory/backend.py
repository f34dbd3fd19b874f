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
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]  # public, unlisted

from wanma.collectives.shared_memory.arena import (
    CHUNK_BYTES,
    CROWDED_SPIN_SECONDS,
    SPIN_SECONDS,
    Arena,
    Shape,
    create,
    usual_heap_bytes,
)
from wanma.collectives.shared_memory.native_library import MOST_RANKS
from wanma.collectives.shared_memory.process_group import SharedGroup
from wanma.job.errors import WanmaError

WAY_OUT = "leave parallel.collectives at 'auto', which takes Gloo then, or set it to 'gloo'"


@dataclass(frozen=True)
class Way:
    """Configuration of the backend in this process."""

    library: Path | None
    """Compiled C++ library; None: there is none."""
    reason: str = ""
    """Reason for a missing library; empty otherwise."""
    required: bool = False
    """True if a group without shared memory is an error."""
    local_ranks: int = 1
    """Number of the run's ranks on this host."""


@dataclass(frozen=True)
class _Member:
    """Facts that a rank tells the other ranks of a group."""

    host: str
    process: int
    reason: str
    """Obstacle to sharing memory; empty if there is none."""


def backend(way: Way) -> str:
    """Register a backend and return its name for `init_process_group` and `new_group`."""
    name = "shared_or_error" if way.required else "shared"
    _ways[name] = way
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _creator(name), extended_api=True, devices=["cpu"])
    return name


_ways: dict[str, Way] = {}
"""Configuration of each backend by its name, kept for the process, as torch keeps its backends."""


def shared_group(group: dist.ProcessGroup | None) -> SharedGroup | None:
    """Return `group`, or the world's if None, as a shared-memory group; None if it is another."""
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, SharedGroup) else None


def allocated_bytes() -> int:
    """Return the largest memory, in bytes, that this process's groups held for its own tensors."""
    groups = list(distributed_c10d._world.pg_map)
    return sum(group.allocated_bytes for group in groups if isinstance(group, SharedGroup))


def why_not(group: dist.ProcessGroup) -> str:
    """Return the reason why `group`, made by this backend, is Gloo's; empty for other groups."""
    return "" if isinstance(group, SharedGroup) else _reasons.get(str(group.group_name), "")


_reasons: dict[str, str] = {}
"""Reasons for Gloo, by the name of the group."""


def _creator(name: str) -> Callable[[Any, Any], Any]:
    def create_group(options: Any, _: Any) -> Any:
        return _make(options, _ways[name])

    return create_group


def _make(options: Any, way: Way) -> Any:
    """Create the process group of a rank; every rank of the group calls it."""
    store, rank, ranks = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    gloo._set_sequence_number_for_group()
    if ranks == 1:
        return gloo
    # The same store may have seen a group of this name before, whose messages are not for this one.
    meeting = PrefixStore(f"shared/{store.add(f'shared/{rank}', 1)}", store)
    members = _tell_all(meeting, "member", rank, ranks, asdict(_Member(host_id(), os.getpid(), way.reason)))
    found = [_Member(**member) for member in members]
    reason = _against(found)
    arena = None
    if not reason:
        arena, reason = _arena(meeting, way, rank, found)
    if arena is None:
        if way.required:
            raise WanmaError(f"parallel.collectives = 'shared_memory' cannot be done: {reason}", WAY_OUT)
        _reasons[str(options.group_id)] = reason
        return gloo
    hosts = (tuple(range(ranks)),)
    return SharedGroup(store, arena, gloo, options.timeout, hosts)


def _against(members: Sequence[_Member]) -> str:
    """Return the obstacle to sharing memory among these ranks; empty if there is none."""
    for rank, member in enumerate(members):
        if member.reason:
            return (
                f"rank {rank} cannot: {member.reason}"
                if len({m.reason for m in members}) > 1
                else member.reason
            )
    hosts = len({member.host for member in members})
    if hosts > 1:
        return f"the {len(members)} ranks are on {hosts} hosts"
    if len(members) > MOST_RANKS:
        return f"{len(members)} ranks are more than {MOST_RANKS}"
    return ""


def _arena(store: Any, way: Way, rank: int, members: Sequence[_Member]) -> tuple[Arena | None, str]:
    """Create and map the arena of all ranks, or return the obstacle: the same on every rank."""
    assert way.library is not None  # without one there is a reason
    ranks = len(members)
    crowded = max(ranks, way.local_ranks) > len(os.sched_getaffinity(0))
    spin = CROWDED_SPIN_SECONDS if crowded else SPIN_SECONDS
    shape = Shape(ranks, CHUNK_BYTES, usual_heap_bytes(ranks), spin)
    made, arena, problem = -1, None, ""
    try:
        if rank == 0:
            try:
                made = create(way.library, shape)
            finally:
                store.set("arena", str(made))
            descriptor = made
        else:
            theirs = int(store.get("arena"))
            if theirs < 0:
                raise OSError(None, "rank 0 could not make it")
            descriptor = os.open(f"/proc/{members[0].process}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
        try:
            arena = Arena(way.library, shape, descriptor, rank, [member.process for member in members])
        finally:
            if rank != 0:
                os.close(descriptor)
    except OSError as error:
        problem = f"rank {rank} cannot map the memory: {error.strerror or error}"
    # The first rank's descriptor may close only now, when all ranks have opened it or have failed to.
    problems = _tell_all(store, "mapped", rank, ranks, problem)
    if made >= 0:
        os.close(made)
    reason = next((text for text in problems if text), "")
    return (None if reason else arena), reason


def _tell_all(store: Any, what: str, rank: int, ranks: int, value: Any) -> list[Any]:
    """Publish a value and return every rank's value, by rank."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{peer}")) for peer in range(ranks)]


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
