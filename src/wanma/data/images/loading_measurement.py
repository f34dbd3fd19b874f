"""Loading cost of stored images: bytes of a sample from the files, decoding measured on some samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from wanma.data.cache.node_cache import NodeCache
from wanma.data.formats.format import BadDataError
from wanma.data.images.stored_images import StoredImages, sampled_rows
from wanma.data.images.transform import uniform_draws
from wanma.data.index.records import read_each
from wanma.data.stores.filesystems import is_local
from wanma.data.stores.remote_file import MAX_REQUEST_BYTES, OpenableFile
from wanma.data.stores.store_probe import measured_store_rates
from wanma.job.errors import JobError
from wanma.job.forecast.data_feed import SampleLoading

_SECONDS = 0.3
"""Seconds of decoding after which the measurement ends."""


def measure_loading(
    images: StoredImages,
    *,
    read_threads: int,
    loader_threads: int,
    by_processes: bool,
    cache: Path,
    is_store_probed: bool,
) -> SampleLoading:
    """Return the loading cost of the training samples.

    The measured samples are those that opening the images has read, so that a store is asked for no others.

    Args:
        is_store_probed: measure a store of which there is no record.
    """
    index = images.train
    files = [file for group in index.groups for file in group.files]
    sizes = [file.size for file in files]
    stored = [file.stored for file in files if isinstance(file, OpenableFile)]
    remote = [file for file in stored if not is_local(file.filesystem)]
    opener = getattr(files[0], "opener", None)  # one for all files
    node_cache = getattr(opener, "__self__", None)
    return SampleLoading(
        samples=index.estimated_rows,
        sample_bytes=sum(sizes) / index.estimated_rows,
        file_bytes=sum(sizes) / len(sizes),
        decode_seconds=_decode_seconds(images),
        is_remote=images.is_remote,
        read_threads=read_threads,
        loader_threads=loader_threads,
        cache_block_bytes=MAX_REQUEST_BYTES,
        store=measured_store_rates(remote, cache, is_probed=is_store_probed),
        by_processes=by_processes,
        store_bytes=sum(file.size for file in remote),
        cached_bytes=node_cache.held_bytes(remote) if isinstance(node_cache, NodeCache) else 0,
    )


def mean_loading(parts: Sequence[SampleLoading], shares: Sequence[float]) -> SampleLoading:
    """Return the loading cost of a mixture: the mean of its sources by their shares of the samples."""
    if len(parts) == 1:
        return parts[0]
    known = [
        (part.decode_seconds, share)
        for part, share in zip(parts, shares, strict=True)
        if part.decode_seconds is not None and share
    ]
    largest = parts[max(range(len(parts)), key=shares.__getitem__)]
    return replace(
        largest,
        samples=sum(part.samples for part in parts),
        sample_bytes=sum(part.sample_bytes * share for part, share in zip(parts, shares, strict=True)),
        file_bytes=sum(part.file_bytes * share for part, share in zip(parts, shares, strict=True)),
        decode_seconds=sum(one * share for one, share in known) / sum(share for _, share in known)
        if known
        else None,
        is_remote=any(part.is_remote for part in parts),
        store=next((part.store for part in parts if part.store is not None), None),
        store_bytes=sum(part.store_bytes for part in parts),
        cached_bytes=sum(part.cached_bytes for part in parts),
    )


def _decode_seconds(images: StoredImages) -> float | None:
    """Return the median seconds to decode and transform one sample; None: none can be decoded.

    The first one is decoded twice: its first decoding imports Pillow's decoder.
    """
    sampled = read_each(images.train, sampled_rows(images.train))
    records = [one for one in sampled if not isinstance(one, BadDataError)]
    out = np.empty(images.transform.shape, np.float32)
    seconds: list[float] = []
    begin = time.perf_counter()
    for number, record in enumerate([*records[:1], *records]):
        draws = uniform_draws(0, "loading measurement", number)
        start = time.perf_counter()
        try:
            images.transform.write(record[images.fields.image], out, draws)
        except (ValueError, KeyError, JobError):
            continue  # reported with its row when training reads it
        if number:
            seconds.append(time.perf_counter() - start)
        if seconds and time.perf_counter() - begin > _SECONDS:
            break
    return statistics.median(seconds) if seconds else None
