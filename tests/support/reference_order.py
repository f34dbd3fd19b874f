"""The order of samples in plain Python: epochs as lists, mixtures by counting, one number at a time.

It shares no line with `wanma.data.sampling`, and needs memory and time for every sample before the position.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Stage = tuple[int, Sequence[int]]
"""First sample, and the weights of the sources from there on."""


def mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value %= 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def permuted(items: list[Any], *key: int | str, group: int | None = None) -> list[Any]:
    """`items` in the order of the Feistel network of `key`."""
    bits = (len(items) - 1).bit_length()
    low_bits, high_bits = bits - bits // 2, bits // 2
    keys = struct.unpack("<8Q", hashlib.blake2b(json.dumps(key).encode(), digest_size=64).digest())
    keys = keys if group is None else tuple(mix(group + key) for key in keys)

    def network(value: int) -> int:
        low, high = value % 2**low_bits, value >> low_bits
        for low_key, high_key in zip(keys[::2], keys[1::2], strict=True):
            low ^= mix(high + low_key) % 2**low_bits
            high ^= mix(low + high_key) % 2**high_bits
        value = high << low_bits | low
        return value if value < len(items) else network(value)

    return [items[network(index)] for index in range(len(items))]


def epoch(size: int, kind: str, block: int, window: int, *key: int | str) -> list[int]:
    """The rows of one epoch in order."""
    rows = list(range(size))
    if kind == "none":
        return rows
    if kind == "full":
        return permuted(rows, *key)
    blocks = permuted([rows[first : first + block] for first in range(0, size, block)], *key, "blocks")
    count = max(len(blocks) // window, 1)
    lengths = [len(blocks) // count + (number < len(blocks) % count) for number in range(count)]
    windows = [[blocks.pop(0) for _ in range(length)] for length in lengths]
    shuffled = [
        permuted(list(itertools.chain(*part)), *key, "window", group=number)
        for number, part in enumerate(windows)
    ]
    return list(itertools.chain(*shuffled))


def stream(size: int, kind: str, block: int, window: int, *key: int | str) -> Iterator[int]:
    """The rows of endless epochs."""
    for number in itertools.count():
        yield from epoch(size, kind, block, window, *key, number)


def interleaved(stages: Sequence[Stage]) -> Iterator[int]:
    """The source of each sample: at each fork the side whose rounded due count grows."""
    for sample in itertools.count():
        starting = [weights for first, weights in stages if first == sample]
        if starting:
            weights, counts = starting[0], Counter[tuple[int, int]]()
        first, end = 0, len(weights)
        while end - first > 1:
            node, middle = (first, end), (first + end) // 2
            left, total = sum(weights[first:middle]), sum(weights[first:end])
            before, after = (
                (2 * count * left + total) // (2 * total) for count in (counts[node], counts[node] + 1)
            )
            counts[node] += 1
            first, end = (first, middle) if after > before else (middle, end)
        yield first


def reference_order(
    sizes: Sequence[int], stages: Sequence[Stage], shuffle: tuple[str, int, int], seed: int, total: int
) -> list[tuple[int, int]]:
    """(source, row) of the first `total` samples of a mixture."""
    streams = [stream(size, *shuffle, seed, "source", number) for number, size in enumerate(sizes)]
    return [(source, next(streams[source])) for source in itertools.islice(interleaved(stages), total)]
