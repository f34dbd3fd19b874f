"""Loading and preparation of data (input), forecast of the data feed (output), as pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoreRates:
    """Measured rates of a store, as this machine reaches it; None: that one is not measured."""

    latency_seconds: float | None = None
    """Seconds of a request beyond the transfer of its bytes."""
    connection_bytes_per_second: float | None = None
    """Bandwidth of one request, in bytes/s."""
    bytes_per_second: float | None = None
    """Bandwidth of requests side by side, in bytes/s."""
    origin: str = ""
    """Measurement in words: 'measured on 2026-11-27'; empty: none."""
    fault: str = ""
    """Reason why a rate is not measured; empty: nothing failed."""


@dataclass(frozen=True)
class SampleLoading:
    """Loading cost of the samples of stored files, as the files and a short measurement of them give it."""

    samples: int
    """Samples of one epoch."""
    sample_bytes: float
    """Mean stored bytes of a sample."""
    file_bytes: float
    """Mean size in bytes of a stored file."""
    decode_seconds: float | None
    """Seconds of one core to decode and transform a sample, median; None: no sampled one can be decoded."""
    is_remote: bool
    """True if a file is not in local storage."""
    read_threads: int
    """Files that one rank reads from a store at once."""
    loader_threads: int
    """Least number of steps that one rank loads at once."""
    cache_block_bytes: int
    """Bytes of a block that the node cache downloads at once."""
    decode_origin: str = "measured on this machine"
    """Measurement of `decode_seconds` in words."""
    store: StoreRates | None = None
    """Measured rates of the store; None: local files."""
    is_own: bool = False
    """True: a dataset of the user's own, whose `decode_seconds` is the time to read a sample."""
    core_share: float = 1.0
    """Share of `decode_seconds` in which a core works, 0 .. 1; in the rest the reader waits, for files."""
    by_processes: bool = False
    """True if loader processes decode, each a batch of its own; False: threads."""
    store_bytes: int = 0
    """Size in bytes of the files that are not in local storage."""
    cached_bytes: int = 0
    """Bytes of these files that the node cache of this machine holds."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SampleLoading:
        store = StoreRates(**value["store"]) if value.get("store") else None
        return cls(**{**value, "store": store})


@dataclass(frozen=True)
class TextPreparation:
    """Preparation of a job's text: the token files that are built before the first step."""

    text_bytes: int
    """Stored bytes of all text."""
    missing_bytes: int
    """Stored bytes whose token files are not in the cache; 0: the text is prepared."""
    bytes_per_second: float | None
    """Stored bytes that one process tokenizes in a second; None: not measured."""
    rate_origin: str
    """Measurement of that rate in words, or the reason why there is none."""
    per_process_bytes: int
    """Bytes of text for each process: a small text is prepared by few."""
    is_remote: bool
    """True if a file is not in local storage."""
    store: StoreRates | None = None
    """Measured rates of the store; None: local files."""
    fault: str = ""
    """Reason why the text is unknown on this machine; empty: it is known."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextPreparation:
        store = StoreRates(**value["store"]) if value.get("store") else None
        return cls(**{**value, "store": store})


@dataclass(frozen=True)
class PreparationForecast:
    """Forecast of a text preparation on one node."""

    seconds: float
    """Seconds before the first step."""
    missing_bytes: int
    """Bytes that are tokenized."""
    processes: int
    """Processes that tokenize."""
    limits: tuple[FeedLimit, ...]
    """Parts and the bytes/s at which each alone would prepare, the slowest first."""
    devices: int
    """Devices that wait."""
    remedies: tuple[str, ...] = ()
    """Ways out, the best first; empty where the wait is short."""
    origins: tuple[str, ...] = ()
    """Origins of the rates: given, measured, or assumed."""


@dataclass(frozen=True)
class FeedLimit:
    """One part of loading, and the rate at which it alone would supply samples."""

    cause: str
    """Name of the part: 'store bandwidth', 'store requests', 'disk', 'decoding', 'copying', 'reading'."""
    samples_per_second: float
    """Rate over all nodes; of a preparation, bytes per second of one node."""


@dataclass(frozen=True)
class FeedRemedy:
    """Change that lets the data supply more."""

    change: str
    """Change, as a setting or in words."""
    fed_devices: float
    """Number of devices that keep up after it."""


@dataclass(frozen=True)
class DataFeed:
    """Forecast of the data feed: the samples that loading supplies, beside those that the devices consume."""

    devices: int
    """Ranks of the plan."""
    fed_devices: float
    """Number of devices that the data keep busy, up to `devices`."""
    share: float
    """Supplied over consumed samples, >= 0; below 1 the devices wait. While the store is read, if it is."""
    samples_per_second: float
    """Rate that loading supplies, over all nodes."""
    consumed_samples_per_second: float
    """Rate that the devices consume if they never wait for data."""
    limits: tuple[FeedLimit, ...]
    """Parts of loading, the slowest first."""
    store_share: float = 0.0
    """Share of the run's samples that are read from a store: those before the node cache has all; 0 .. 1."""
    remedies: tuple[FeedRemedy, ...] = ()
    """Changes that help, the best first; empty if `share` >= 1."""
    assumed: tuple[str, ...] = ()
    """Origins of the rates: assumed, or measured, when and where."""
    workers: int = 1
    """Loader threads of a rank: those of the job, or the plan's choice for `data.workers = "auto"`."""
