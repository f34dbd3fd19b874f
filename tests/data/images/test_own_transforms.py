"""Image transforms of an installed package: the same pixels in any process, errors that name the sample."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from support.labelled_images import write_tar
from wanma.data.opening import open_dataset
from wanma.data.step_loader import StepLoader
from wanma.job.errors import EXIT_FAILED, EXIT_USAGE, JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=4, global_batch=6, seed=3)
MODULE = """\
import os
import signal

import numpy as np

def noise(pixels, random):
    if random is None:
        return pixels
    return pixels + random.integers(0, 50, pixels.shape, np.uint8)

def invert(pixels, random):
    pixels[...] = 255 - pixels
    return pixels

def crash(pixels, random):
    raise KeyError("no such palette")

def crop(pixels, random):
    return pixels[1:]

def stamp(pixels, random):
    pixels[...] = [os.getpid() >> shift & 255 for shift in (16, 8, 0)]
    return pixels

def die(pixels, random):
    os.kill(os.getpid(), signal.SIGKILL)

constant = 7
"""
ENTRIES = """\
[wanma.image_transforms]
noise = own_transforms:noise
invert = own_transforms:invert
crash = own_transforms:crash
crop = own_transforms:crop
stamp = own_transforms:stamp
die = own_transforms:die
constant = own_transforms:constant
absent = own_transforms:absent
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with image transforms."""
    folder = tmp_path / "site" / "own_transforms-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-transforms\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    (folder.parent / "own_transforms.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder.parent)
    (tmp_path / "images").mkdir()
    write_tar(tmp_path / "images", 30)


def section(folder: Path, *augment: str, **keys: object) -> DataSection:
    return DataSection(
        images=[str(folder / "images")],
        image_transform={"size": 8, "mean": [0], "std": [1], "augment": augment},  # type: ignore[arg-type]
        cache=str(folder / "cache"),
        validation_fraction=0.2,
        **keys,  # type: ignore[arg-type]
    )


def samples(data: DataSection, world: int) -> dict[int, torch.Tensor]:
    """Return the pixels of each sample of a training on `world` ranks."""
    found = {}
    for rank in range(world):
        plan = Plan(dp_replicate=world, micro_batch=3)
        with StepLoader(open_dataset(data, TRAIN), plan, TRAIN, rank, 0, prefetch=2) as steps:
            for batch in (one for step in steps for one in step.micro_batches):
                found |= dict(zip(batch.samples.tolist(), batch.inputs[0], strict=True))
    return found


def test_pixels_depend_on_seed_and_sample_alone(tmp_path: Path) -> None:
    names = ("horizontal_flip", "noise", "random_resized_crop", "invert")
    one = samples(section(tmp_path, *names, worker_processes=False), 1)
    assert sorted(one) == list(range(24))
    for world, workers, chosen in ((2, 1, None), (1, 3, None), (3, 2, False)):
        other = samples(section(tmp_path, *names, workers=workers, worker_processes=chosen), world)
        assert other.keys() == one.keys()
        assert all(torch.equal(one[number], other[number]) for number in one)
    assert len({pixels.numpy().tobytes() for pixels in one.values()}) == 24


def test_transforms_follow_their_order_and_see_validation_images_without_random_changes(
    tmp_path: Path,
) -> None:
    plain, inverted, noisy, both = (
        open_dataset(section(tmp_path, *names, worker_processes=False), TRAIN)
        for names in ((), ("invert",), ("noise",), ("noise", "invert"))
    )
    train = [dataset.batch(range(6)).inputs[0].numpy() for dataset in (plain, inverted, noisy, both)]
    assert np.allclose(train[1], 1 - train[0], atol=1e-6)
    assert np.allclose(train[3], 1 - train[2], atol=1e-6)
    assert not np.allclose(train[2], train[0], atol=1e-3)
    held = [one.validation_batch(range(4)).inputs[0].numpy() for one in (plain, inverted, noisy)]
    assert np.allclose(held[1], 1 - held[0], atol=1e-6)
    assert np.array_equal(held[2], held[0])


@pytest.mark.parametrize("chosen", [None, False], ids=["unset", "threads"])
def test_transforms_run_in_a_loader_process_and_their_time_is_that_of_the_rank(
    tmp_path: Path, chosen: bool | None
) -> None:
    data = open_dataset(section(tmp_path, "stamp", worker_processes=chosen), TRAIN)
    values = (data.batch(range(6)).inputs[0][:, :, 0, 0] * 255).round().long()
    (process,) = set((values * torch.tensor([1 << 16, 1 << 8, 1])).sum(1).tolist())
    assert (process == os.getpid()) == (chosen is False)
    seconds = data.load_times.take()
    assert min(seconds[part] for part in ("read", "decode", "transform", "collate")) > 0


def test_a_loader_process_that_is_killed_fails_the_rank_so_that_the_run_recovers(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"process 0 of images .*SIGKILL") as raised:
        open_dataset(section(tmp_path, "die"), TRAIN).batch([0])
    assert raised.value.exit_code == EXIT_FAILED


@pytest.mark.parametrize("bad_data", ["refuse", "skip"])
@pytest.mark.parametrize(("name", "cause"), [("crash", "no such palette"), ("crop", "(7, 8, 3)")])
def test_a_failing_transform_ends_the_run_with_its_name_and_the_sample(
    tmp_path: Path, name: str, cause: str, bad_data: str
) -> None:
    chosen = None if bad_data == "refuse" else False
    dataset = open_dataset(section(tmp_path, name, bad_data=bad_data, worker_processes=chosen), TRAIN)
    with pytest.raises(JobError) as raised:
        dataset.batch([17])
    assert raised.value.exit_code == EXIT_USAGE
    for part in (f"own_transforms:{name}", "data.image_transform.augment", ".tar: row", "sample 17", cause):
        assert part in raised.value.message
    assert name in raised.value.hint


@pytest.mark.parametrize(
    ("name", "part"),
    [("nose", "'noise'"), ("absent", "own_transforms:absent"), ("constant", "own_transforms:constant")],
)
def test_a_transform_that_is_missing_is_named_at_the_start(tmp_path: Path, name: str, part: str) -> None:
    with pytest.raises(JobError) as raised:
        open_dataset(section(tmp_path, name), TRAIN)
    assert f"augment: {'there' if name == 'nose' else 'the'}" in raised.value.message
    assert part in str(raised.value)
