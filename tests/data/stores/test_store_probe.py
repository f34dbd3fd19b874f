"""Probe of a store: figures, deadlines, records."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from support.s3_server import s3_server
from wanma.data.stores import rate_records, store_probe
from wanma.data.stores.client import store_client
from wanma.data.stores.listing import StoredFile, list_files
from wanma.data.stores.rate_records import read_rates, write_rates
from wanma.data.stores.store_probe import measured_store_rates, probe_store, store_name
from wanma.job.forecast.data_feed import StoreRates

LATENCY, CONNECTION, SHARED = 0.03, 50e6, 200e6


@dataclass
class Store:
    """Store with exact rates, on a clock of its own."""

    now: float = 0.0
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    fails: bool = False

    def clock(self) -> float:
        return self.now

    def request(self, path: str, start: int, end: int) -> None:
        if self.fails:
            raise OSError("down")
        self.requests.append((path, start, end))
        self.now += LATENCY + (end - start) / CONNECTION

    def map(self, _: Callable[[Any], object], items: Sequence[tuple[str, int, int]]) -> None:
        self.requests += items
        self.now += LATENCY + sum(end - start for _, start, end in items) / SHARED


def stored(name: str, size: int) -> StoredFile:
    return StoredFile(fsspec.filesystem("memory"), name, f"s3://bucket/{name}", size, "1", False, "data.text")


def test_a_probe_finds_latency_and_both_bandwidths() -> None:
    store = Store()
    rates = probe_store([stored("a", 1 << 30), stored("b", 1 << 20)], store, store.clock)
    assert rates.latency_seconds == pytest.approx(LATENCY, rel=1e-3)
    assert rates.connection_bytes_per_second == pytest.approx(CONNECTION, rel=1e-3)
    assert rates.bytes_per_second == pytest.approx(SHARED, rel=1e-3)
    assert rates.fault == ""
    assert sum(end - start for _, start, end in store.requests) <= 40 << 20


def test_small_files_tell_the_latency_alone() -> None:
    store = Store()
    rates = probe_store([stored("a", 1000)], store, store.clock)
    assert rates.latency_seconds == pytest.approx(LATENCY, rel=1e-3)
    assert (rates.connection_bytes_per_second, rates.bytes_per_second) == (None, None)


def test_a_store_that_fails_is_a_reason_and_no_error() -> None:
    assert probe_store([stored("a", 1000)], Store(fails=True)) == StoreRates(
        fault="a probe of the store failed: OSError"
    )
    assert probe_store([stored("a", 0)], Store()).fault == "no file has content to probe"


def test_what_was_measured_before_a_store_fell_silent_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, silence = threading.Event(), threading.Event()

    class Stalling(Store):
        def request(self, path: str, start: int, end: int) -> None:
            if end - start > 1:
                stalled.set()
                silence.wait()
            super().request(path, start, end)

    store = Stalling()
    monkeypatch.setattr(threading.Thread, "join", lambda _thread, _seconds: stalled.wait(60))
    try:
        rates = probe_store([stored("a", 1 << 30)], store, store.clock)
    finally:
        silence.set()
    assert rates.latency_seconds == pytest.approx(LATENCY, rel=1e-3)
    assert (rates.connection_bytes_per_second, rates.bytes_per_second, rates.fault) == (None, None, "")


def test_a_slow_store_is_asked_for_little() -> None:
    class Slow(Store):
        def request(self, path: str, start: int, end: int) -> None:
            super().request(path, start, end)
            self.now += (end - start) / 300e3

    store = Slow()
    rates = probe_store([stored("a", 1 << 30)], store, store.clock)
    assert rates.connection_bytes_per_second == pytest.approx(300e3, rel=0.01)
    assert store.now < 3.0, "seconds of the probe's clock"


def test_the_name_of_a_store_has_no_credentials() -> None:
    file = stored("a", 1)
    assert store_name(file) == "s3://bucket"
    filesystem = SimpleNamespace(endpoint_url="http://me:secret@minio:9000")
    name = store_name(replace(file, filesystem=filesystem))
    assert name == "s3://bucket http://***@minio:9000"


def test_a_store_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = threading.Event()

    class Silent(Store):
        def request(self, path: str, start: int, end: int) -> None:
            silence.wait()

    monkeypatch.setattr(store_probe, "MAX_WAIT_SECONDS", 0.05)
    try:
        found = probe_store([stored("a", 1000)], Silent())
    finally:
        silence.set()
    assert found.fault == "the store did not answer a probe within 0.05 s"


def test_a_real_store_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_probe, "MAX_WAIT_SECONDS", 600.0)
    with s3_server(monkeypatch) as server:
        server.put("a.bin", b"x" * (1 << 20))
        files = list_files(["s3://bucket/a.bin"], "data.text")
        assert measured_store_rates(files, tmp_path, is_probed=False) == StoreRates(
            fault="data.probe_store = false"
        )
        first = measured_store_rates(files, tmp_path, is_probed=True)
        assert first is not None
        assert first.origin.startswith("measured by a probe on ")
        assert first.latency_seconds is not None
        assert first.latency_seconds > 0
        requests = store_client(files[0].filesystem).traffic["store_requests", "s3"]
        assert measured_store_rates(files, tmp_path, is_probed=True) == first
        assert store_client(files[0].filesystem).traffic["store_requests", "s3"] == requests, (
            "the record serves"
        )


def test_local_files_have_no_store(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    assert (
        measured_store_rates(list_files([str(tmp_path / "a")], "data.text"), tmp_path, is_probed=True) is None
    )


# ------------------------------------------------------------------ records


def test_a_record_has_its_day_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = [datetime.date(2026, 11, 1)]
    monkeypatch.setattr(rate_records, "_today", lambda: days[0])
    written = write_rates(tmp_path, "store", "s3://bucket", "probe", {"latency_seconds": 0.02})
    assert read_rates(tmp_path, "store", "s3://bucket") == written
    assert written.origin == "measured by a probe on 2026-11-01"
    assert read_rates(tmp_path, "store", "s3://other") is None
    days[0] = datetime.date(2026, 12, 2)
    assert read_rates(tmp_path, "store", "s3://bucket") is None
    days[0] = datetime.date(2026, 10, 31)
    assert read_rates(tmp_path, "store", "s3://bucket") is None, "a clock that went back"


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    write_rates(tmp_path, "store", "s3://bucket", "probe", {"latency_seconds": 0.02})
    (path,) = (tmp_path / "rates").iterdir()
    for content in ("", "[]", '{"name": "s3://bucket", "figures": {"latency_seconds": "no"}}'):
        path.write_text(content)
        assert read_rates(tmp_path, "store", "s3://bucket") is None


def test_another_host_measures_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rates(tmp_path, "decoding", "a", "run one", {"core_seconds": 0.02})
    monkeypatch.setattr(rate_records.socket, "gethostname", lambda: "another")
    assert read_rates(tmp_path, "decoding", "a") is None


def test_a_name_that_is_no_utf8_only_loses_the_record(tmp_path: Path) -> None:
    assert write_rates(tmp_path, "reading", "bytes .\udcff", "run one", {"bytes_per_second": 1.0}).figures
    assert read_rates(tmp_path, "reading", "bytes .\udcff") is None


def test_a_cache_that_cannot_be_written_to_only_loses_the_record(tmp_path: Path) -> None:
    (tmp_path / "rates").write_text("a file")
    assert write_rates(tmp_path, "store", "s3://bucket", "probe", {"latency_seconds": 0.02}).figures
