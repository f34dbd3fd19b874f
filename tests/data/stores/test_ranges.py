"""Cutting and joining of ranges, and the gate before a store."""

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.data.stores.client import RequestGate
from wanma.data.stores.remote_file import merge_ranges, select_ranges, split_range

CONTENT = bytes(index * 7 % 251 for index in range(400))
RANGES = st.lists(
    st.tuples(st.integers(0, 399), st.integers(1, 90)).map(lambda p: (p[0], min(sum(p), 400))), min_size=1
)


@given(RANGES, st.integers(0, 30), st.integers(1, 64))
def test_pieces_of_merged_ranges_hold_every_range(
    ranges: list[tuple[int, int]], gap: int, max_size: int
) -> None:
    spans = merge_ranges(ranges, gap)
    assert all(first[1] + gap < second[0] for first, second in pairwise(spans))
    pieces = [piece for span in spans for piece in split_range(*span, max_size)]
    assert all(0 < end - start <= max_size for start, end in pieces)
    contents = [CONTENT[start:end] for start, end in pieces]
    assert select_ranges(ranges, pieces, contents) == [CONTENT[start:end] for start, end in ranges]


def test_ranges_close_to_each_other_are_one() -> None:
    assert merge_ranges([(50, 60), (0, 10), (12, 20)], max_gap=2) == [(0, 20), (50, 60)]


def test_a_range_is_cut_into_as_few_pieces_of_about_one_size_as_possible() -> None:
    assert split_range(0, 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert split_range(100, 109, 8) == [(100, 105), (105, 109)]
    assert split_range(3, 11, 8) == [(3, 11)]


def test_the_gate_bounds_requests_and_bytes_in_flight() -> None:
    gate, lock, running, most = RequestGate(max_requests=4, max_bytes=30), threading.Lock(), [], []

    def request() -> None:
        with gate.admit(10):
            with lock:
                running.append(1)
                most.append(len(running))
            time.sleep(0.01)
            with lock:
                running.pop()

    threads = [threading.Thread(target=request) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 3


def test_a_request_above_the_limit_of_bytes_passes_alone() -> None:
    gate = RequestGate(max_bytes=10)
    with gate.admit(1000):
        pass


def test_a_slow_down_pauses_all_requests_and_admits_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = RequestGate(max_requests=8)
    start = time.monotonic()
    gate.slow_down(0.2)
    gate.slow_down(5.0)  # the answer to another request of the same moment
    with gate.admit(1):
        waited = time.monotonic() - start
    assert 0.2 <= waited < 3
    assert int(gate._request_limit) == 4, "one of the two counts"
    for _ in range(8):
        gate.record_success()
    assert int(gate._request_limit) == 5
