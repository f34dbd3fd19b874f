"""Law 2 for mixtures of images: the very images, at any world size, by runs that end anywhere."""

from __future__ import annotations

import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.data_files import add_member
from support.killed_runs import read_with_kills
from support.labelled_images import picture
from support.reference_order import permuted, reference_order
from wanma.data.opening import open_dataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=9, global_batch=16, batch_ramp=[(2, 5), (4, 9)], seed=5)
TOTAL = samples_consumed_before(TRAIN, TRAIN.steps)
SHUFFLES = [("full", 1, 1), ("block", 3, 2), ("none", 1, 1)]
MIXTURES: dict[str, list[tuple[int, list[int]]]] = {
    "static": [(0, [7, 2, 1])],
    "curriculum": [(0, [7, 2, 1]), (40, [1, 0, 3]), (71, [0, 1, 1])],
}
SIZES = (40, 25, 17)
FIRST = (0, 40, 65)
"""Label of the first image of each source; every image has a label of its own."""
WORLD_SIZES = (1, 2, 3, 4, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of images: a tar of samples, a table, and folders named by their classes."""
    folder = tmp_path_factory.mktemp("sources")
    for name in "abc":
        (folder / name).mkdir()
    with tarfile.open(folder / "a" / "a.tar", "w") as archive:
        for row in range(SIZES[0]):
            add_member(archive, f"{row:04d}.png", picture(row))
            add_member(archive, f"{row:04d}.cls", str(FIRST[0] + row).encode())
    table = {
        "img": [picture(row) for row in range(SIZES[1])],
        "kind": [FIRST[1] + row for row in range(SIZES[1])],
    }
    pq.write_table(pa.table(table), folder / "b" / "b.parquet", row_group_size=6)
    for row in range(SIZES[2]):
        path = folder / "c" / str(FIRST[2] + row) / "one.jpg"
        path.parent.mkdir()
        path.write_bytes(picture(row, "jpeg"))
    return folder


def section(folder: Path, stages: list[tuple[int, list[int]]], **keys: Any) -> DataSection:
    starts = [start for start, _ in stages]
    sources = [
        {
            "name": name,
            "images": [str(folder / name)],
            "weight": list(zip(starts, [weights[number] for _, weights in stages], strict=True)),
            **({"columns": {"target": "kind"}} if name == "b" else {}),
            **({} if name == "c" else {"class_names": [str(number) for number in range(sum(SIZES))]}),
        }
        for number, name in enumerate("abc")
    ]
    return DataSection(sources=sources, cache=str(folder / "cache"), **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=[kind for kind, *_ in SHUFFLES])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_images_of_a_mixture_are_read_in_the_order_of_the_reference(
    folder: Path, mixture: str, shuffle: tuple[str, int, int]
) -> None:
    kind, block, window = shuffle
    draw = random.Random(f"{mixture} {kind}")
    threads = draw.choice([1, 2])
    data = section(
        folder,
        MIXTURES[mixture],
        validation_fraction=0,
        shuffle=kind,
        block_samples=block,
        window_blocks=window,
        workers=threads,
    )
    worlds = draw.sample(WORLD_SIZES, k=4)
    found = read_with_kills(lambda: open_dataset(data, TRAIN), TRAIN, worlds, threads, draw.randrange(100))
    rows = [
        permuted(list(range(size)), "validation split") if kind == "full" else list(range(size))
        for size in SIZES
    ]
    order = reference_order(SIZES, MIXTURES[mixture], shuffle, TRAIN.seed, TOTAL)
    expected = [FIRST[source] + rows[source][row] for source, row in order]
    assert found == list(enumerate(expected))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_pixels_are_those_of_the_labels_at_any_world_size(folder: Path, world: int) -> None:
    from wanma.data.step_loader import StepLoader
    from wanma.job.plan.plan import Plan

    keys = {"size": 8, "augment": ["random_resized_crop", "horizontal_flip"]}
    data = section(folder, MIXTURES["curriculum"], validation_fraction=0, image_transform=keys)
    by_hand, plan = open_dataset(data, TRAIN), Plan(dp_replicate=world, micro_batch=3)
    for rank in range(world):
        with StepLoader(open_dataset(data, TRAIN), plan, TRAIN, rank, 4, prefetch=2) as steps:
            for step in steps:
                for batch in step.micro_batches:
                    expected = by_hand.batch(batch.samples[batch.real].tolist() or [0])
                    if batch.real.any():
                        assert (batch.inputs[0][batch.real] == expected.inputs[0]).all()


def test_proportions_are_exact_in_each_stage_and_epochs_go_on_across_stages(folder: Path) -> None:
    data = section(folder, MIXTURES["curriculum"], validation_fraction=0)
    train = TrainSection(steps=30, global_batch=10, seed=5)
    dataset = open_dataset(data, train)
    targets = dataset.batch(range(300)).targets.numpy()
    sources = np.searchsorted(FIRST, targets, side="right") - 1
    assert np.bincount(sources[:40], minlength=3).tolist() == [28, 8, 4]
    assert np.bincount(sources[40:68], minlength=3).tolist() == [7, 0, 21]
    assert np.bincount(sources[71:], minlength=3)[0] == 0
    described = dataset.describe()["sources"]
    counts = np.bincount(sources, minlength=3)
    assert [one["epochs"] for one in described] == [
        pytest.approx(count / size) for count, size in zip(counts, SIZES, strict=True)
    ]
    for source, size in enumerate(SIZES):  # each epoch has each image once
        own = targets[sources == source]
        for start in range(0, len(own), size):
            epoch = own[start : start + size].tolist()
            assert len(set(epoch)) == len(epoch)
