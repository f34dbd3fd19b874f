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

from wanma.checkpoint.format.local_shards import arrangement, local_part, pieces_of

CHUNK_ELEMENTS = 1 << 22
"""Elements of a tensor on a GPU hashed at a time: three temporary copies of 8 bytes each."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNED = struct.Struct("<q")


@dataclass(frozen=True)
class Group:
    """Hashes (64 bits, signed) by tensor of the shards that this rank shares with the same other ranks."""

    replicas: tuple[int, ...]
    hashes: Mapping[str, int]

    @property
    def number(self) -> int:
        """Number of the group in the world: a hash of its ranks, the same on each of them."""
        return _hash64(struct.pack(f"<{len(self.replicas)}q", *self.replicas))

    @property
    def digest(self) -> int:
        """Hash of all hashes, in the order of the tensors' names."""
        text = b"".join(name.encode() + _SIGNED.pack(self.hashes[name]) for name in sorted(self.hashes))
        return _hash64(text)


@dataclass(frozen=True)
class Difference:
    """Shard of one tensor that ranks hold differently."""

    name: str
    holders: tuple[tuple[int, ...], ...]
    """Ranks with equal content, the largest set first."""

    @property
    def odd(self) -> tuple[int, ...]:
        """Ranks outvoted by more than half of all; empty without a majority."""
        first, *others = self.holders
        outvoted = sum(map(len, others))
        return tuple(sorted(rank for ranks in others for rank in ranks)) if len(first) > outvoted else ()


class SharedParts:
    """Hasher of the shards that one rank shares with others.

    Args:
        replicas: ranks that hold the same plain (not DTensor) tensors under the same names.
    """

    def __init__(self, replicas: Sequence[int]) -> None:
        self._replicas = tuple(replicas)
        self._arrangement: tuple[object, ...] | None = None
        self._names: dict[tuple[int, ...], list[str]] = {}

    def groups(self, tensors: Mapping[str, torch.Tensor]) -> list[Group]:
        """Hash the shared shards by replica group; reads all of them.

        Args:
            tensors: full name -> tensor or DTensor.
        """
        if (now := arrangement(tensors)) != self._arrangement:
            names: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
            for piece in pieces_of(tensors, self._replicas):
                if len(piece.replicas) > 1:
                    names[piece.replicas].append(piece.name)
            self._names, self._arrangement = dict(sorted(names.items())), now
        return [
            Group(ranks, dict(zip(names, hashes([local_part(tensors[name]) for name in names]), strict=True)))
            for ranks, names in self._names.items()
        ]


def hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a signed 64-bit hash of each tensor's content: XXH3 in host memory.

    On a GPU it is computed there: the sum of its words, each multiplied by an odd number of its position,
    modulo 2^64. So every change of one word changes it, and so do two words that change places.
    """
    on_device = [_sum_of_words(tensor) for tensor in tensors if tensor.is_cuda]
    sums = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(sums) if tensor.is_cuda else _hash_in_memory(tensor) for tensor in tensors]


def differences(told: Iterable[tuple[int, Mapping[str, int]]]) -> list[Difference]:
    """List the tensors that the ranks of one group hold differently, by name.

    Args:
        told: (rank, hash by tensor) of each rank.
    """
    holders: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_tensors in told:
        for name, value in of_tensors.items():
            holders[name][value].append(rank)
    return [
        Difference(name, tuple(sorted(map(tuple, alike.values()), key=lambda ranks: (-len(ranks), ranks))))
        for name, alike in sorted(holders.items())
        if len(alike) > 1
    ]


def disagreeing(rows: Collection[Sequence[int]]) -> set[int]:
    """Return the numbers of the groups whose ranks have different digests.

    Args:
        rows: per rank, number and digest of each of its groups, one after the other; zeros at the end.
    """
    digests: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        for number, digest in zip(row[::2], row[1::2], strict=True):
            digests[number].add(digest)
    return {number for number, given in digests.items() if len(given) > 1}


def _hash_in_memory(tensor: torch.Tensor) -> int:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _hash64(content.data)


def _sum_of_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the hash of a tensor on its GPU, () int64."""
    words = tensor.contiguous().reshape(-1).view(_WORDS[tensor.element_size()])
    places = 2 * torch.arange(min(words.numel(), CHUNK_ELEMENTS), dtype=torch.int64, device=tensor.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, words.numel(), CHUNK_ELEMENTS):
        chunk = words[first : first + CHUNK_ELEMENTS].long()
        total += (chunk * (places[: chunk.numel()] + 2 * first)).sum()
    return total


def _hash64(content: bytes | memoryview) -> int:
    """Return XXH3-64 as a signed number, as torch's tensors hold it."""
    return int.from_bytes(xxhash.xxh3_64_digest(content), "little", signed=True)
