"""Law 2 for every shuffle and mixture: the very sequence of samples, at any world size, killed anywhere."""

import itertools
import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.killed_runs import (
    BLOCK,
    MIXTURES,
    SHUFFLES,
    TOTAL,
    TRAIN,
    WINDOW,
    WORLD_SIZES,
    expected_rows,
    order_keys,
    read_with_kills,
    source_weights,
)
from support.order_reader import ROWS, RUN, Rows
from support.reference_order import permuted, reference_order, stream
from support.table_files import write_table
from wanma.data.opening import open_dataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.sampling.order import SampleOrder, Shuffle, order_difference
from wanma.job.sections.data import DataSection, SourceSection

STAGES: dict[str, list[tuple[int, list[int]]]] = {"one source": [(0, [1])], **MIXTURES}
RUN_TOTAL = samples_consumed_before(RUN, RUN.steps)
"""Samples of a run of `support.order_reader`."""


def order_of(
    sizes: Sequence[int], stages: list[tuple[int, list[int]]], shuffle: tuple[str, int, int], seed: int
) -> SampleOrder:
    return SampleOrder.of_mixture(sizes, source_weights(stages), Shuffle(*shuffle), seed)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    mixture=st.sampled_from(sorted(STAGES)),
    kind=st.sampled_from(SHUFFLES),
    block=st.integers(1, 9),
    window=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 90), min_size=3, max_size=3),
    seed=st.integers(0, 2**40),
    start=st.integers(0, 300),
)
def test_any_slice_of_any_order_is_that_of_the_plain_reference(
    mixture: str, kind: str, block: int, window: int, sizes: list[int], seed: int, start: int
) -> None:
    stages = STAGES[mixture]
    sizes = sizes[: len(stages[0][1])]
    expected = reference_order(sizes, stages, (kind, block, window), seed, start + 40)[start:]
    found = order_of(sizes, stages, (kind, block, window), seed).locate(np.arange(start, start + 40))
    assert list(zip(*(part.tolist() for part in found), strict=True)) == expected


LIVES = st.lists(st.sampled_from(WORLD_SIZES), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    shuffle=st.sampled_from(SHUFFLES),
    worlds=LIVES,
    threads=st.sampled_from([1, 2]),
    fraction=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 1000),
)
def test_a_map_style_dataset_is_read_in_the_order_of_the_reference(
    shuffle: str, worlds: list[int], threads: int, fraction: float, seed: int
) -> None:
    keys = {**order_keys(shuffle), "validation_fraction": fraction, "workers": threads}
    section = DataSection(**keys)
    found = read_with_kills(lambda: open_dataset(section, RUN, Rows()), RUN, worlds, threads, seed)
    training = permuted(list(range(ROWS)), "validation split")[: ROWS - 5 if fraction else ROWS]
    if shuffle != "full":
        training = sorted(training)
    rows = itertools.islice(stream(len(training), shuffle, BLOCK, WINDOW, RUN.seed), RUN_TOTAL)
    assert found == [(sample, training[row]) for sample, row in enumerate(rows)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of numbers as text; no two sequences of 8 bytes are equal."""
    folder = tmp_path_factory.mktemp("sources")
    for number, size in enumerate((40, 25, 17)):
        text = "".join(f"{chr(97 + number)}{row:06},"[:8] for row in range(size))
        (folder / f"{number}.txt").write_text(text)
    return folder


@settings(max_examples=25, deadline=None)
@given(
    shuffle=st.sampled_from(SHUFFLES),
    mixture=st.sampled_from(sorted(STAGES)),
    worlds=LIVES,
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_text_is_read_in_the_order_of_the_reference(
    corpus: Path, shuffle: str, mixture: str, worlds: list[int], threads: int, seed: int
) -> None:
    stages = STAGES[mixture]
    files = [corpus / f"{number}.txt" for number in range(len(stages[0][1]))]
    sources = [
        SourceSection(name=path.stem, text=[str(path)], weight=weight)
        for path, weight in zip(files, source_weights(stages), strict=True)
    ]
    keys = {**order_keys(shuffle), "sequence_length": 8, "cache": str(corpus / "cache")}
    section = DataSection(sources=sources, **keys)
    found = read_with_kills(lambda: open_dataset(section, TRAIN), TRAIN, worlds, threads, seed)
    texts = [path.read_bytes() + bytes([0]) for path in files]
    sizes = [(len(text) - 1) // 8 for text in texts]
    order = reference_order(sizes, stages, (shuffle, BLOCK, WINDOW), TRAIN.seed, TOTAL)
    expected = [(sample, _target_tokens(texts[source], row)) for sample, (source, row) in enumerate(order)]
    assert found == expected


def _target_tokens(text: bytes, row: int) -> tuple[int, ...]:
    """The tokens after those of the row's 8 inputs; the end of the document is token 256."""
    last = len(text) - 1
    return tuple(256 if place == last else text[place] for place in range(row * 8 + 1, row * 8 + 9))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_images_are_read_in_the_order_of_the_reference(tmp_path: Path, shuffle: str) -> None:
    images = np.arange(40, dtype=np.uint8)[:, None, None] * np.ones((1, 3, 3), np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(40))
    section = DataSection(images=str(tmp_path / "images.npz"), **order_keys(shuffle))
    found = read_with_kills(lambda: open_dataset(section, TRAIN))
    order = itertools.islice(stream(40, shuffle, BLOCK, WINDOW, TRAIN.seed), TOTAL)
    assert found == list(enumerate(order))


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("kind", "suffix"), [("full", "jsonl"), ("block", "parquet")])
def test_processes_that_are_killed_read_the_order_of_the_reference_together(
    tmp_path: Path, kind: str, suffix: str, workers: int
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    write_table(folder / f"a.{suffix}", [{"row": row} for row in range(ROWS)])
    draw = random.Random(f"{kind} {workers}")
    read: dict[int, int] = {}
    first_step, ended = 0, False
    for world in itertools.cycle(draw.sample(WORLD_SIZES, len(WORLD_SIZES))):
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "support.order_reader", str(folder)),
                *(str(world), str(first_step), kind, str(workers)),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])},
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in itertools.islice(process.stdout, draw.randint(20, 60)):
            if ended := line == "end\n":
                break
            step, sample, row = map(int, line.split())
            assert read.setdefault(sample, row) == row
            first_step = step  # the last step that was whole is the one before
        process.kill()
        process.stdout.close()
        process.wait()
        if ended:
            break
    assert [read[sample] for sample in range(RUN_TOTAL)] == expected_rows(ROWS, kind, RUN_TOTAL)


@pytest.mark.parametrize("kind", ["full", "block", "none"])
def test_a_trillion_samples_are_located_anywhere_without_memory_for_them(kind: str) -> None:
    weights = [[(0, 1.0), (10**9, 0.2)], [(0, 0.0), (10**9, 1.0)]]
    order = SampleOrder.of_mixture([10**12, 3 * 10**11 + 7], weights, Shuffle(kind, 1024, 32), 1)  # type: ignore[arg-type]
    positions = np.random.default_rng(0).integers(0, 4 * 10**12, 20_000)
    order.locate(positions[:10])
    tracemalloc.start()
    sources, rows = order.locate(positions)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 100 * positions.nbytes
    assert rows.min() >= 0
    for source, size in enumerate(order.epoch_sizes):
        assert rows[sources == source].max() < size
        assert (sources == source).mean() == pytest.approx((0.2 / 1.2, 1 / 1.2)[source], abs=0.02)
    again = order.locate(positions[::-1].copy())
    assert again[1][::-1].tolist() == rows.tolist()


def test_epochs_and_shares_of_a_curriculum_count_its_samples() -> None:
    order = order_of([10, 30], [(0, [1, 0]), (20, [1, 3])], ("full", 1, 1), 1)
    assert order.samples_before(60) == (30, 30)
    assert order.epochs(60) == [3.0, 1.0]
    assert order.shares(60) == [0.5, 0.5]
    assert SampleOrder.of_source(10, Shuffle(), 1).epochs(25) == [2.5]
    assert order_of([10, 30], [(0, [1, 3])], ("full", 1, 1), 1).shares(7) == [0.25, 0.75]


def test_orders_differ_in_the_shuffle_or_in_the_stages_that_a_run_has_begun() -> None:
    def identity(stages: list[tuple[int, list[int]]], shuffle: tuple[str, int, int] = ("full", 1, 1)) -> str:
        return order_of([10, 10], stages, shuffle, 1).identity()

    begun = identity([(0, [1, 1]), (100, [1, 3])])
    assert order_difference(begun, begun, 500) == ""
    assert order_difference(begun, identity([(0, [1, 1])]), 100) == ""
    assert order_difference(begun, identity([(0, [1, 1]), (100, [1, 4]), (200, [1, 0])]), 100) == ""
    later = order_difference(begun, identity([(0, [1, 1])]), 101)
    assert later == (
        "the weights of data.sources were 1:1 from sample 0 on, 1:3 from sample 100 on, and are 1:1 from "
        "sample 0 on"
    )
    assert order_difference(begun, identity([(0, [2, 1])]), 0)
    full, block = (
        SampleOrder.of_source(9, shuffle, 1).identity() for shuffle in (Shuffle(), Shuffle("block", 8, 3))
    )
    assert order_difference(full, block, 0) == (
        "data.shuffle was full, and is block of 8 samples, 3 in a window"
    )
    assert order_difference("", block, 5) == order_difference(block, "", 5) == ""
    assert full == SampleOrder.of_source(9, Shuffle("full", 7, 7), 1).identity()
    reseeded = SampleOrder.of_source(9, Shuffle(), 2).identity()
    assert order_difference(full, reseeded, 5) == "train.seed was 1, and is 2"
    grown = SampleOrder.of_source(1000, Shuffle(), 1).identity()
    assert order_difference(full, grown, 5).startswith("an epoch had 9 training samples, and has 1,000 (")
    plain = [SampleOrder.of_source(9, Shuffle("none"), seed).identity() for seed in (1, 2)]
    assert order_difference(*plain, 5) == ""  # no draw, no seed
    older = json.dumps({"shuffle": "full", "stages": []})
    assert order_difference(older, grown, 5) == ""
