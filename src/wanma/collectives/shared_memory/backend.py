"""Shared memory as a backend that torch knows: whoever asks torch for a group gets one.

Ranks that meet in a group tell each other, through the group's store, where they are and what they can. On
one host they share an arena; otherwise, or where one of them cannot, the group is Gloo's.
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
    """How this process makes groups."""

    library: Path | None
    """The compiled C++."""
    reason: str = ""
    """Why there is none."""
    required: bool = False
    """Anything but shared memory is an error."""
    local_ranks: int = 1
    """Of the whole run, on this host."""


@dataclass(frozen=True)
class _Member:
    """What a rank tells the others of itself."""

    host: str
    process: int
    reason: str
    """Why it cannot share memory; nothing if it can."""


def backend(way: Way) -> str:
    """The name by which torch makes groups this way: for `init_process_group` and `new_group`."""
    name = "shared_or_error" if way.required else "shared"
    _ways[name] = way
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _creator(name), extended_api=True, devices=["cpu"])
    return name


_ways: dict[str, Way] = {}
"""By the name of the backend: torch keeps backends for the process, and so do we."""


def shared_group(group: dist.ProcessGroup | None) -> SharedGroup | None:
    """`group`, the world's by default, where it goes over shared memory."""
    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, SharedGroup) else None


def allocated_bytes() -> int:
    """Of this process's groups: the most memory that they gave out for its own tensors."""
    groups = list(distributed_c10d._world.pg_map)
    return sum(group.allocated_bytes for group in groups if isinstance(group, SharedGroup))


def why_not(group: dist.ProcessGroup) -> str:
    """Why `group`, which a backend of ours has made, is Gloo's; nothing where it is not."""
    return "" if isinstance(group, SharedGroup) else _reasons.get(str(group.group_name), "")


_reasons: dict[str, str] = {}
"""By the name of the group."""


def _creator(name: str) -> Callable[[Any, Any], Any]:
    def create_group(options: Any, _: Any) -> Any:
        return _make(options, _ways[name])

    return create_group


def _make(options: Any, way: Way) -> Any:
    """The group of a rank; every rank of the group is in here."""
    store, rank, ranks = options.store, options.group_rank, options.group_size
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, timeout=options.timeout)
    gloo.options.global_ranks_in_group = options.global_ranks_in_group
    gloo.options.group_name = options.group_id
    gloo._set_sequence_number_for_group()
    if ranks == 1:
        return gloo
    # The same store may have seen a group of this name before: what was said there is not for us.
    meeting = PrefixStore(f"shared/{store.add(f'shared/{rank}', 1)}", store)
    members = _tell_all(meeting, "member", rank, ranks, asdict(_Member(host_id(), os.getpid(), way.reason)))
    found = [_Member(**member) for member in members]
    reason = _against(found)
    arena = None
    if not reason:
        arena, reason = _arena(meeting, way, rank, found)
    if arena is None:
        if way.required:
            raise WanmaError(f"parallel.collectives = 'shared' cannot be done: {reason}", WAY_OUT)
        _reasons[str(options.group_id)] = reason
        return gloo
    hosts = (tuple(range(ranks)),)
    return SharedGroup(store, arena, gloo, options.timeout, hosts)


def _against(members: Sequence[_Member]) -> str:
    """Why these do not share memory; nothing if they can."""
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
    """All ranks' arena, or why there is none: the same on every rank."""
    assert way.library is not None  # or there would be a reason
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
    # Only now, when all have it or will not get it, may the first one's descriptor go.
    problems = _tell_all(store, "mapped", rank, ranks, problem)
    if made >= 0:
        os.close(made)
    reason = next((text for text in problems if text), "")
    return (None if reason else arena), reason


def _tell_all(store: Any, what: str, rank: int, ranks: int, value: Any) -> list[Any]:
    """What every rank says, by rank."""
    store.set(f"{what}/{rank}", json.dumps(value))
    return [json.loads(store.get(f"{what}/{peer}")) for peer in range(ranks)]


def host_id() -> str:
    """The same for processes that can share memory, reach each other's files and see each other's end.

    That is: of one boot of one machine, and in the same containers' namespaces of processes and of the
    network: who emulates several machines on one wants them to talk over the network.
    """
    parts = [str(os.getuid())]
    for path in ("/proc/self/ns/pid", "/proc/self/ns/net"):
        with contextlib.suppress(OSError):
            parts.append(str(Path(path).readlink()))
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)
