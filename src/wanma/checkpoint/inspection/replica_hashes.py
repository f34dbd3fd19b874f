"""Comparison of replicas: hashes of the shards that several ranks hold, and the ranks that differ.

The ranks that hold the same shard follow from the tensors' placements (`local_shards`). One number travels
per replica group; names of tensors only where those numbers differ. Nothing here communicates.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from wanma.checkpoint.format.local_shards import local_shards, local_tensor, shard_layout_key

CHUNK_ELEMENTS = 1 << 22
"""Elements of a tensor on a GPU hashed at a time: three temporary copies of 8 bytes each."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = struct.Struct("<q")


@dataclass(frozen=True)
class ReplicaHashes:
    """Hashes (64 bits, signed) by tensor of the shards that this rank shares with the same other ranks."""

    ranks: tuple[int, ...]
    hashes: Mapping[str, int]

    @property
    def group_hash(self) -> int:
        """Number of the group in the world: a hash of its ranks, the same on each of them."""
        return _hash64(struct.pack(f"<{len(self.ranks)}q", *self.ranks))

    @property
    def content_hash(self) -> int:
        """Hash of all hashes, in the order of the tensors' names."""
        text = b"".join(name.encode() + _SIGNED.pack(self.hashes[name]) for name in sorted(self.hashes))
        return _hash64(text)


@dataclass(frozen=True)
class ReplicaMismatch:
    """Shard of one tensor that ranks hold differently."""

    name: str
    ranks_by_content: tuple[tuple[int, ...], ...]
    """Ranks with equal content, the largest set first."""

    @property
    def outlier_ranks(self) -> tuple[int, ...]:
        """Ranks outvoted by more than half of all; empty without a majority."""
        majority, *minorities = self.ranks_by_content
        minority_size = sum(map(len, minorities))
        return (
            tuple(sorted(rank for ranks in minorities for rank in ranks))
            if len(majority) > minority_size
            else ()
        )


class ReplicaHasher:
    """Hasher of the shards that one rank shares with others.

    Args:
        replicas: ranks that hold the same plain (not DTensor) tensors under the same names.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        self._replicas = tuple(replicas)
        self._layout_key: tuple[object, ...] | None = None
        self._names: dict[tuple[int, ...], list[str]] = {}

    def hash_groups(self, tensors: Mapping[str, torch.Tensor]) -> list[ReplicaHashes]:
        """Hash the shared shards by replica group; reads all of them.

        Args:
            tensors: full name -> tensor or DTensor.
        """
        if (layout_key := shard_layout_key(tensors)) != self._layout_key:
            names: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
            for piece in local_shards(tensors, self._replicas):
                if len(piece.replicas) > 1:
                    names[piece.replicas].append(piece.name)
            self._names, self._layout_key = dict(sorted(names.items())), layout_key
        return [
            ReplicaHashes(
                ranks,
                dict(zip(names, hash_tensors([local_tensor(tensors[name]) for name in names]), strict=True)),
            )
            for ranks, names in self._names.items()
        ]


def hash_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit hash of each tensor's content: XXH3 in host memory.

    On a GPU it is computed there: the sum of its words, each multiplied by an odd number of its position,
    modulo 2^64. So every change of one word changes it, and so do two words that change places.
    """
    device_hashes = [_hash_device_tensor(tensor) for tensor in tensors if tensor.is_cuda]
    sums = iter(torch.stack(device_hashes).tolist() if device_hashes else [])
    return [next(sums) if tensor.is_cuda else _hash_host_tensor(tensor) for tensor in tensors]


def find_mismatches(hashes_by_rank: Iterable[tuple[int, Mapping[str, int]]]) -> list[ReplicaMismatch]:
    """List the tensors that the ranks of one group hold differently, by name.

    Args:
        hashes_by_rank: (rank, hash by tensor) of each rank.
    """
    holders: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, tensor_hashes in hashes_by_rank:
        for name, value in tensor_hashes.items():
            holders[name][value].append(rank)
    return [
        ReplicaMismatch(
            name, tuple(sorted(map(tuple, ranks_by_hash.values()), key=lambda ranks: (-len(ranks), ranks)))
        )
        for name, ranks_by_hash in sorted(holders.items())
        if len(ranks_by_hash) > 1
    ]


def find_mismatched_groups(group_hashes_by_rank: Collection[Sequence[int]]) -> set[int]:
    """Return the numbers of the groups whose ranks have different digests.

    Args:
        group_hashes_by_rank: per rank, number and digest of each of its groups, one after the other; zeros
            at the end.
    """
    digests: defaultdict[int, set[int]] = defaultdict(set)
    for row in group_hashes_by_rank:
        for number, digest in zip(row[::2], row[1::2], strict=True):
            digests[number].add(digest)
    return {number for number, group_digests in digests.items() if len(group_digests) > 1}


def _hash_host_tensor(tensor: torch.Tensor) -> int:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _hash64(content.data)


def _hash_device_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor on its GPU, () int64."""
    words = tensor.contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    multipliers = (
        2 * torch.arange(min(words.numel(), CHUNK_ELEMENTS), dtype=torch.int64, device=tensor.device) + 1
    )
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, words.numel(), CHUNK_ELEMENTS):
        chunk = words[first : first + CHUNK_ELEMENTS].long()
        total += (chunk * (multipliers[: chunk.numel()] + 2 * first)).sum()
    return total


def _hash64(content: bytes | memoryview) -> int:
    """Return XXH3-64 as a signed number, as torch's tensors hold it."""
    return int.from_bytes(xxhash.xxh3_64_digest(content), "little", signed=True)
