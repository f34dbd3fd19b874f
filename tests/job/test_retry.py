"""Trying again: how often, how long, and what is not tried again."""

from __future__ import annotations

import errno
import io
import random
import threading
import time
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.errors import WanmaError
from wanma.job.retry import RetryingFile, RetryPolicy, backoff_delays, is_permanent, retry

QUICK = RetryPolicy(
    max_attempts=4, deadline_seconds=60, initial_backoff_seconds=0.001, max_backoff_seconds=0.002
)


class Flaky:
    """Fails so many times, then works."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


def test_what_works_at_the_last_try_is_returned() -> None:
    flaky = Flaky(3, ConnectionResetError("reset"))
    assert retry(flaky, QUICK) == "done"
    assert flaky.calls == 4


def test_after_the_last_try_its_error_is_raised_with_the_number_of_tries() -> None:
    flaky = Flaky(9, TimeoutError("slow"))
    with pytest.raises(TimeoutError, match="slow") as caught:
        retry(flaky, QUICK)
    assert flaky.calls == 4
    assert caught.value.__notes__[0].startswith("after 4 tries in ")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("forbidden"),
        OSError(errno.ENOSPC, "full"),
        WanmaError("of our own"),
        ValueError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_no_second_try_mends_is_raised_at_once(error: Exception) -> None:
    flaky = Flaky(9, error)
    with pytest.raises(type(error)):
        retry(flaky, QUICK)
    assert flaky.calls == 1
    assert not hasattr(error, "__notes__")


def test_unknown_errors_of_a_storage_library_may_pass() -> None:
    class EndpointError(Exception):
        pass

    assert not is_permanent(EndpointError("no connection"))
    assert not is_permanent(OSError(errno.EIO, "input/output error"))


class Clock:
    """Time that passes in pauses alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_no_try_begins_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("wanma.job.retry.time", clock)
    flaky = Flaky(99, TimeoutError("slow"))
    patience = RetryPolicy(
        max_attempts=99, deadline_seconds=15, initial_backoff_seconds=4, max_backoff_seconds=4
    )
    with pytest.raises(TimeoutError):
        retry(flaky, patience)
    assert 11 < clock.now <= 15
    assert 4 <= flaky.calls <= 8


def test_a_stop_ends_a_long_pause_and_nothing_is_tried_again() -> None:
    stop = threading.Event()
    flaky = Flaky(99, TimeoutError("slow"))
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        retry(flaky, RetryPolicy(initial_backoff_seconds=60), stop=stop)
    assert time.monotonic() - began < 10
    assert flaky.calls == 1


@given(
    tries=st.integers(1, 12),
    first=st.floats(0.01, 5),
    longest=st.floats(5, 60),
    seed=st.integers(0, 1000),
)
def test_pauses_double_up_to_the_longest_and_are_drawn_apart(
    tries: int, first: float, longest: float, seed: int
) -> None:
    patience = RetryPolicy(tries, 1e9, first, longest)
    found = list(backoff_delays(patience, random.Random(seed)))
    assert len(found) == tries
    assert found[-1] is None
    for number, pause in enumerate(found[:-1]):
        whole = min(first * 2**number, longest)
        assert pause is not None
        assert whole / 2 <= pause <= whole * (1 + 1e-9)


def test_retrying_leaves_the_process_generator_alone() -> None:
    state = random.getstate()
    retry(Flaky(2, TimeoutError()), QUICK)
    assert random.getstate() == state


class Torn(io.BytesIO):
    """Its first read fails in the middle."""

    def __init__(self, content: bytes, errors: list[Exception]) -> None:
        super().__init__(content)
        self._errors = errors

    def read(self, size: int | None = -1) -> bytes:
        if self.tell() >= 4 and self._errors:
            raise self._errors.pop(0)
        return super().read(size)


def read_all(file: RetryingFile) -> bytes:
    with file:
        return b"".join(iter(lambda: file.read(4), b""))


def test_a_file_is_read_on_from_where_it_was_after_a_failure_that_passes() -> None:
    errors: list[Exception] = [ConnectionResetError("gone"), OSError(errno.EIO, "worse")]
    opened: list[Torn] = []

    def open_file() -> Torn:
        if len(opened) == 1:
            opened.append(Torn(b"", []))
            raise TimeoutError("not yet")
        opened.append(Torn(b"0123456789", errors))
        return opened[-1]

    assert read_all(RetryingFile(open_file, QUICK)) == b"0123456789"
    assert len(opened) == 4, "opened, failed to open, opened, opened"
    assert all(file.closed for file in (opened[0], *opened[2:]))


def test_a_file_that_is_gone_or_fails_too_often_is_an_error() -> None:
    def missing() -> IO[bytes]:
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        RetryingFile(missing, QUICK)
    errors: list[Exception] = [OSError(f"number {number}") for number in range(9)]
    file = RetryingFile(lambda: Torn(b"0123456789", errors), QUICK)
    assert file.read(4) == b"0123"
    with pytest.raises(OSError, match="number") as caught:
        file.read(4)
    assert f"after {QUICK.max_attempts} tries" in caught.value.__notes__[0]
