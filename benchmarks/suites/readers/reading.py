"""Measurement of a reader of training samples: what it prints is what `wanma bench` reads.

All readers shuffle, read batches without end, and give PyTorch tensors as a training loop takes them. Before
it is timed, a reader is run with `--check`: one pass, whose samples are compared with the data.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from contents import Batch, Content
from memory import PEAK_INTERVAL_SECONDS, MemoryPeak
from remote_store import RemoteStore

REPORT_SECONDS = 0.1
SMALL_SECONDS = 0.3
SMALL_START = 4_800


def parse(description: str | None, *, forms: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the options that all readers have.

    Args:
        description: text of the help.
        forms: forms of the data that the reader has, of which `--form` chooses one; the first is the default.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="folder of the data, which is made if it is missing")
    parser.add_argument("--batch", type=int, default=16, help="samples of a batch")
    parser.add_argument("--workers", type=int, default=0, help="processes that read; 0: none")
    parser.add_argument("--start", type=int, default=0, help="samples that have been consumed before")
    parser.add_argument("--seconds", type=float, default=6.0, help="duration after the first batch")
    parser.add_argument("--whole-pass", action="store_true", help="read at least each sample once")
    parser.add_argument("--cold", action="store_true", help="drop the data from the page cache before")
    parser.add_argument("--check", action="store_true", help="compare one pass with the data, and end")
    parser.add_argument("--small", action="store_true", help="little data, in a folder of its own")
    if forms:
        parser.add_argument("--form", choices=forms, default=forms[0], help="form of the stored data")
    options = parser.parse_args()
    if options.small:
        options.folder /= "small"
        options.seconds, options.start = min(options.seconds, SMALL_SECONDS), min(options.start, SMALL_START)
    if options.check:
        options.start = 0
    return options


@dataclass(frozen=True)
class Begin:
    """Moment at which a reader begins to open its data."""

    seconds: float
    """Time by `time.perf_counter`."""
    memory: MemoryPeak
    """Memory since then."""


def begin(options: argparse.Namespace, *folders: Path, bystanders: tuple[int, ...] = ()) -> Begin:
    """Begin to measure: what follows opens the data.

    Args:
        options: options of the reader.
        folders: files that it reads; with `--cold` they leave the page cache of the operating system.
        bystanders: numbers of child processes that are no part of the reader.
    """
    if options.cold:
        for folder in folders:
            for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
                if path.is_file():
                    _drop_pages(path)
    memory = MemoryPeak(bystanders)
    return Begin(time.perf_counter(), memory)


def measure(
    batches: Iterator[Batch],
    content: Content,
    options: argparse.Namespace,
    began: Begin,
    *,
    link_bytes_per_second: float | None = None,
) -> None:
    """Read for some seconds, and print samples as they come.

    Args:
        batches: (inputs, targets), without end; with `--check` one pass is enough.
        content: samples of a pass.
        options: options of the reader.
        began: moment at which the reader began to open the data.
        link_bytes_per_second: rate of the link over which the first pass comes; None: there is none.
    """
    if options.check:
        content.check(_one_pass(batches, content.samples))
        print(f"wanma figure checked_samples {content.samples}", flush=True)
        return
    inputs, targets = next(batches)
    first = time.perf_counter()
    print(f"wanma figure first_batch_seconds {first - began.seconds:.6f}", flush=True)
    kind = (inputs.dtype, targets.dtype)
    assert kind in ((torch.int64, torch.int64), (torch.float32, torch.int64)), kind
    samples = total = first_samples = len(inputs)
    told = looked = first
    paused = 0.0
    pass_seconds = None
    while True:
        now = time.perf_counter()
        if now - told >= REPORT_SECONDS:
            print(f"wanma step samples {samples} seconds {now - told:.6f}", flush=True)
            samples, told = 0, now
            if now - looked >= PEAK_INTERVAL_SECONDS:
                began.memory.look()
                looked = told = time.perf_counter()
                paused += told - now
        if pass_seconds is None and total >= content.samples:
            pass_seconds = now - began.seconds - paused
        if now - first >= options.seconds and (pass_seconds is not None or not options.whole_pass):
            break
        inputs, _ = next(batches)
        samples += len(inputs)
        total += len(inputs)
    began.memory.look()
    elapsed = now - first - paused
    sample_bytes = content.stored_bytes / content.samples
    _figure("read_bytes_per_second", (total - first_samples) * sample_bytes / elapsed)
    if pass_seconds is not None and options.whole_pass:
        _figure("first_pass_seconds", pass_seconds)
        _figure("first_pass_bytes_per_second", content.stored_bytes / pass_seconds)
        if link_bytes_per_second is not None:
            _figure("link_share", content.stored_bytes / pass_seconds / link_bytes_per_second)
    _figure("memory_bytes", began.memory.peak_bytes)
    _figure("worker_memory_bytes", began.memory.growth_bytes / max(options.workers, 1))


def measure_link(
    batches: Iterator[Batch], content: Content, options: argparse.Namespace, began: Begin, store: RemoteStore
) -> None:
    """Read a whole pass from a store, and print its share of what the link carries; see `measure`."""
    options.whole_pass = True
    measure(batches, content, options, began, link_bytes_per_second=store.bytes_per_second)


def _figure(name: str, value: float) -> None:
    print(f"wanma figure {name} {value:.9g}", flush=True)


def _one_pass(batches: Iterator[Batch], samples: int) -> Iterator[Batch]:
    """Yield the first `samples` samples."""
    left = samples
    while left:
        inputs, targets = next(batches)
        assert len(inputs) == len(targets), (inputs.shape, targets.shape)
        yield inputs[:left], targets[:left]
        left -= min(left, len(inputs))


def _drop_pages(path: Path) -> None:
    """Drop a file from the page cache; pages that are not on the disk yet are written first."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
