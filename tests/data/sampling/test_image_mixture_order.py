"""Law 2 for mixtures of images: the very images, at any world size, by runs that end anywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from support.killed_runs import (
    MIXTURES,
    SHUFFLES,
    TRAIN,
    WORLD_SIZES,
    expected_mixture,
    order_keys,
    read_with_kills,
    source_weights,
)
from support.labelled_images import picture, write_samples
from support.table_files import write_table
from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection

SIZES = (40, 25, 17)
FIRST = (0, 40, 65)
"""Label of the first image of each source; every image has a label of its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of images: a tar of samples, a table, and folders named by their classes."""
    folder = tmp_path_factory.mktemp("sources")
    write_samples(folder / "a" / "a.tar", map(picture, range(SIZES[0])), range(SIZES[0]))
    (folder / "b").mkdir()
    rows = [{"img": picture(row), "kind": FIRST[1] + row} for row in range(SIZES[1])]
    write_table(folder / "b" / "b.parquet", rows)
    for row in range(SIZES[2]):
        path = folder / "c" / str(FIRST[2] + row) / "one.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(picture(row, "jpeg"))
    return folder


def section(folder: Path, mixture: str, **keys: Any) -> DataSection:
    sources = [
        {
            "name": name,
            "images": [str(folder / name)],
            "weight": weight,
            **({"columns": {"target": "kind"}} if name == "b" else {}),
            **({} if name == "c" else {"class_names": [str(number) for number in range(sum(SIZES))]}),
        }
        for name, weight in zip("abc", source_weights(MIXTURES[mixture]), strict=True)
    ]
    keys = {"validation_fraction": 0, "cache": str(folder / "cache"), **keys}
    return DataSection(sources=sources, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("mixture", MIXTURES)
def test_images_of_a_mixture_are_read_in_the_order_of_the_reference(
    folder: Path, mixture: str, shuffle: str
) -> None:
    draw = random.Random(f"{mixture} {shuffle}")
    threads, worlds = draw.choice([1, 2]), draw.sample(WORLD_SIZES, k=4)
    data = section(folder, mixture, **order_keys(shuffle), workers=threads)
    found = read_with_kills(lambda: open_dataset(data, TRAIN), TRAIN, worlds, threads)
    order = expected_mixture(SIZES, MIXTURES[mixture], shuffle)
    assert found == list(enumerate(FIRST[source] + row for source, row in order))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_pixels_are_those_of_the_labels_at_any_world_size(folder: Path, world: int) -> None:
    keys = {"size": 8, "augment": ["random_resized_crop", "horizontal_flip"]}
    data = section(folder, "curriculum", image_transform=keys)
    by_hand, plan = open_dataset(data, TRAIN), Plan(dp_replicate=world, micro_batch=3)
    for rank in range(world):
        with StepLoader(open_dataset(data, TRAIN), plan, TRAIN, rank, 4, prefetch=2) as steps:
            for step in steps:
                for batch in step.micro_batches:
                    expected = by_hand.batch(batch.samples[batch.real].tolist() or [0])
                    if batch.real.any():
                        assert (batch.inputs[0][batch.real] == expected.inputs[0]).all()
