"""Images in stored files of any format: the same samples in the same order, whoever reads them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.labelled_images import (
    CLASSES,
    SIZE,
    WRITERS,
    label,
    picture,
    shade,
    write_folder,
    write_huggingface,
    write_samples,
    write_tar,
)
from support.s3_server import S3Server
from wanma.data.datasets.stored_image_dataset import StoredImageDataset
from wanma.data.formats.format import BadDataError
from wanma.data.images import fields
from wanma.data.images.stored_images import open_image_sources
from wanma.data.index.sample_index import SampleIndex
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.sampling.permutation import permute_indices, shuffle_indices
from wanma.data.step_loader import StepLoader
from wanma.elastic.failure import failure_from_exception
from wanma.elastic.recovery.restart_policy import RestartPolicy
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

COUNT = 30
TRAIN = TrainSection(steps=20, global_batch=8, seed=5)


def section(folder: Path, *names: str, **keys: Any) -> DataSection:
    keys = {"validation_fraction": 0.0, "cache": str(folder / "cache"), **keys}
    return DataSection(images=[str(folder / name) for name in names] or [str(folder / "data")], **keys)


def opened(folder: Path, *names: str, **keys: Any) -> StoredImageDataset:
    return open_dataset(section(folder, *names, **keys), TRAIN)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        (tmp_path / "data").mkdir(exist_ok=True)
        WRITERS[name](tmp_path / "data", COUNT)
        return tmp_path

    return write


def numbers_of(pixels: torch.Tensor, data: StoredImageDataset) -> list[int]:
    """Return the numbers of one-colored images, read off their red channel."""
    description = data.describe()
    reds = pixels[:, 0].flatten(1).median(1).values
    levels = (reds * description["standard_deviation"][0] + description["mean"][0]) * 255
    return [round(level / 3) for level in levels.tolist()]


def reference_order(samples: range, count: int = COUNT) -> list[int]:
    """The order of the images by definition: a shuffle by epoch, of rows in an order that no seed changes."""
    positions = shuffle_indices(np.array(samples), count, TRAIN.seed)
    return permute_indices(positions, count, "validation split").tolist()


@pytest.mark.parametrize("name", WRITERS)
def test_each_format_gives_the_same_images_with_their_classes(
    write: Callable[[str], Path], name: str
) -> None:
    data = opened(write(name))
    batch = data.batch(range(COUNT))
    assert batch.inputs[0].shape == (COUNT, 3, SIZE, SIZE)
    assert batch.inputs[0].dtype == torch.float32
    numbers = numbers_of(batch.inputs[0], data)
    assert sorted(numbers) == list(range(COUNT))
    assert batch.targets.tolist() == [label(number) for number in numbers]
    assert (data.image_shape, data.classes, data.input_kind) == ((3, SIZE, SIZE), 3, "images")
    if name in ("webdataset", "webdataset-json", "parquet", "arrow", "huggingface", "tfrecord"):
        assert numbers == reference_order(range(COUNT))  # files hold them in the order of their numbers


def test_pixels_are_those_of_the_image_normalized(write: Callable[[str], Path]) -> None:
    keys = {"mean": [0.5, 0.25, 0.0], "std": [0.5, 0.5, 2.0]}
    data = opened(write("webdataset"), image_transform=keys)
    (number,) = reference_order(range(1))
    expected = [(shade(number) / 255 - 0.5) / 0.5, ((255 - shade(number)) / 255 - 0.25) / 0.5, 7 / 255 / 2]
    found = data.batch([0]).inputs[0][0]
    assert torch.allclose(found, torch.tensor(expected).view(3, 1, 1).expand(3, SIZE, SIZE), atol=1e-6)


def test_augmentation_differs_between_epochs_and_not_in_validation(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 20, 3)).astype("u1")
    write_samples(tmp_path / "data" / "a.tar", map(_png, noise), range(COUNT))
    transform = {"size": 10, "augment": ["random_resized_crop", "horizontal_flip"]}
    data = opened(tmp_path, image_transform=transform, validation_fraction=0.2)
    size = data.train_samples
    epochs = [data.batch(range(start, start + size)) for start in (0, size)]
    for number in epochs[0].targets.tolist():
        first, second = (epoch.inputs[0][epoch.targets == number] for epoch in epochs)
        assert not torch.equal(first, second)
    once, again = (data.validation_batch(range(data.validation_samples)) for _ in range(2))
    assert torch.equal(once.inputs[0], again.inputs[0])
    assert not set(once.targets.tolist()) & set(epochs[0].targets.tolist())
    assert data.validation_samples == 6


def _png(pixels: np.ndarray) -> bytes:
    import io

    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "png")
    return stream.getvalue()


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    for number, size in enumerate([(20, 20), (30, 20), (20, 40)]):
        path = tmp_path / "data" / CLASSES[number] / "a.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(picture(number, size=size))
    with pytest.raises(JobError, match=r"data\.images") as raised:
        opened(tmp_path).batch(range(3))
    assert "data.image_transform.size" in raised.value.hint
    data = opened(tmp_path, image_transform={"size": 16})
    assert data.batch(range(3)).inputs[0].shape == (3, 3, 16, 16)


def test_a_colored_image_among_gray_ones_is_refused_by_its_key(tmp_path: Path) -> None:
    images = [_png(np.full((5, 5), number, "u1")) for number in range(100)]
    images[5] = picture(3, size=(5, 5))
    write_samples(tmp_path / "data" / "a.tar", images)
    with pytest.raises(JobError, match="an image has colors"):
        opened(tmp_path).batch(range(100))


def test_the_folders_train_and_val_are_the_splits_with_the_same_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "data" / "train", COUNT)
    only = tmp_path / "data" / "val" / CLASSES[2] / "x.png"
    only.parent.mkdir(parents=True)
    only.write_bytes(picture(40))
    other = tmp_path / "data" / "val" / CLASSES[1] / "y.png"
    other.parent.mkdir(parents=True)
    other.write_bytes(picture(41))
    data = opened(tmp_path)
    assert (data.train_samples, data.validation_samples) == (COUNT, 2)
    batch = data.validation_batch(range(2))
    assert dict(zip(numbers_of(batch.inputs[0], data), batch.targets.tolist(), strict=True)) == {40: 2, 41: 1}


def test_names_of_files_name_the_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data", COUNT)
    for old, new in (("shard-0.tar", "test-00000.tar"), ("shard-1.tar", "train-00000.tar")):
        (tmp_path / "data" / old).rename(tmp_path / "data" / new)
    (tmp_path / "data" / "README.md").write_text("about these images")
    data = opened(tmp_path)
    assert (data.train_samples, data.validation_samples) == (20, 10)


def test_the_splits_of_a_saved_dataset_dict_are_those_of_the_run(tmp_path: Path) -> None:
    for split, count in (("train", COUNT), ("validation", 9), ("test", 5)):
        (tmp_path / "data" / split).mkdir(parents=True)
        write_huggingface(tmp_path / "data" / split, count)
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    data = opened(tmp_path)
    assert (data.train_samples, data.validation_samples) == (COUNT, 9)
    assert data.describe()["format"] == "huggingface"


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["yak", "ant", "yak", "cow", "ant"], [2, 0, 2, 1, 0]),
        (["10", "2", "1", "10", "07"], [3, 1, 0, 3, 2]),
    ],
    ids=["alphabetical", "by value"],
)
def test_names_of_classes_get_numbers_in_their_order(
    names: list[str], numbers: list[int], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table({"png": [picture(number) for number in range(5)], "species": names})
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    with pytest.raises(JobError, match=r"no class .* have png, species"):
        opened(tmp_path)
    data = opened(tmp_path, columns={"target": "species"})
    batch = data.batch(range(5))
    found = dict(zip(numbers_of(batch.inputs[0], data), batch.targets.tolist(), strict=True))
    assert found == dict(enumerate(numbers))
    assert data.classes == len(set(names))


def test_labels_are_read_side_by_side_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data", COUNT)
    monkeypatch.setattr(fields, "_SCANNED_ROWS", 4)
    meeting = threading.Barrier(2, timeout=30)  # passes only when two parts are read together
    numbers = itertools.count()
    read = fields.read_each

    def read_each(index: SampleIndex, rows: np.ndarray) -> list[Any]:
        if next(numbers) < 2:
            meeting.wait()
        return read(index, rows)

    monkeypatch.setattr(fields, "read_each", read_each)
    seen: list[tuple[int, int]] = []
    (source,) = open_image_sources(section(tmp_path), lambda *done: seen.append(done))
    assert source.classes.count == 3
    size = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert seen[-1] == (size, size)
    of_labels = seen[len(seen) - (COUNT + 3) // 4 :]
    assert of_labels == sorted(of_labels)
    assert next(numbers) == (COUNT + 3) // 4, "each part is read once"


def damaged_tar(folder: Path) -> None:
    """Write 30 samples of which number 4 has a cut image, and 11 a text instead of one."""
    images = [picture(number) for number in range(COUNT)]
    images[4], images[11] = images[4][:-30], b"text"
    write_samples(folder / "data" / "a.tar", images, map(label, range(COUNT)))


def test_a_damaged_image_is_refused_with_its_file_and_row(tmp_path: Path) -> None:
    damaged_tar(tmp_path)
    with pytest.raises(BadDataError, match=r"a\.tar: row (4|11): the ") as raised:
        opened(tmp_path).batch(range(COUNT))
    assert "data.bad_data" in raised.value.hint
    failure = failure_from_exception(raised.value, 0, 0, "host", "log")
    assert not RestartPolicy(max_restarts=3).allows_restart(failure), "the data stay as they are"


def test_files_that_are_left_out_as_a_whole_are_told_and_limited(tmp_path: Path) -> None:
    for name in ("a.tar", "b.tar", "c.tar"):
        write_samples(tmp_path / "data" / name, map(picture, range(COUNT)))
    assert opened(tmp_path, bad_data="skip").bad_data_note == ""
    for number, name in enumerate(("a.tar", "b.tar"), 1):
        path = tmp_path / "data" / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2 + 100])
        with pytest.raises(WanmaError, match=r"a\.tar: ") as raised:
            opened(tmp_path)
        assert number == 2 or "data.bad_data" in raised.value.hint
        data = opened(tmp_path, bad_data="skip", bad_data_limit=number)
        assert (data.train_samples, data.bad_file_count) == ((3 - number) * COUNT, number)
        assert f"{number} in all" in data.bad_data_note
        assert "a.tar: " in data.bad_data_note
    keys = section(tmp_path, bad_data="skip", bad_data_limit=1)
    with pytest.raises(JobError, match=r"bad_data_limit: 2 .* 1; .*a\.tar: "):
        prepare_job_data(keys)


def test_files_that_are_all_damaged_are_named_by_the_first(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data", COUNT)
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    for name in names:
        path = tmp_path / "data" / name
        path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(WanmaError, match=rf"{len(names)} of .*: .*{names[0]}: "):
        opened(tmp_path, bad_data="skip")


def test_images_that_are_all_damaged_are_named_by_the_first(tmp_path: Path) -> None:
    write_samples(tmp_path / "data" / "a.tar", [b"no image"] * 4)
    with pytest.raises(JobError, match=r"4 sampled .*a\.tar: row 0: the content"):
        opened(tmp_path, bad_data="skip", columns={"image": "png"})


def test_a_damaged_file_of_an_image_folder_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", COUNT)
    victim = sorted((tmp_path / "data").rglob("*.png"))[3]
    victim.write_bytes(victim.read_bytes()[:-30])
    with pytest.raises(BadDataError, match=rf"{victim.name}: the image"):
        opened(tmp_path).batch(range(COUNT))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_skipped_samples_consume_their_positions_at_any_world_size(tmp_path: Path, ranks: int) -> None:
    damaged_tar(tmp_path)
    keys = {"bad_data": "skip", "columns": {"target": "cls"}}
    data = opened(tmp_path, **keys)
    assert data.classes is not None
    order = reference_order(range(TRAIN.steps * 8))
    expected = [
        [n for n in order[8 * step : 8 * step + 8] if n not in (4, 11)] for step in range(TRAIN.steps)
    ]
    plan = Plan(dp_replicate=ranks, micro_batch=2)
    found: list[list[int]] = [[] for _ in range(TRAIN.steps)]
    bad: list[tuple[int, str]] = []
    for rank in range(ranks):
        with StepLoader(data, plan, TRAIN, rank, 0, prefetch=2) as steps:
            for step in steps:
                for batch in step.micro_batches:
                    assert (batch.targets[~batch.real] == -100).all()
                    found[step.step] += numbers_of(batch.inputs[0][batch.real], data)
                bad += [(one.sample, one.place) for one in step.bad_samples]
    assert found == expected
    places = {f"{tmp_path}/data/a.tar: row {row}" for row in (4, 11)}
    assert {place for _, place in bad} == places
    assert sorted(sample for sample, _ in bad) == [place for place, n in enumerate(order) if n in (4, 11)]


def test_a_substitute_is_drawn_by_seed_and_sample(tmp_path: Path) -> None:
    damaged_tar(tmp_path)
    data = opened(tmp_path, bad_data="substitute")
    order = reference_order(range(2 * COUNT))
    batch = data.batch(range(2 * COUNT))
    assert batch.real.all()
    numbers = numbers_of(batch.inputs[0], data)
    bad_places = [place for place, number in enumerate(order) if number in (4, 11)]
    assert [n for place, n in enumerate(numbers) if place not in bad_places] == [
        n for n in order if n not in (4, 11)
    ]
    assert not {numbers[place] for place in bad_places} & {4, 11}
    assert batch.targets.tolist() == [label(number) for number in numbers]
    assert [one.sample for one in batch.bad_samples] == bad_places
    assert all(one.is_substituted for one in batch.bad_samples)
    for place in bad_places:  # whatever else is in the batch
        alone = opened(tmp_path, bad_data="substitute", workers=2).batch([place])
        assert torch.equal(alone.inputs[0][0], batch.inputs[0][place])


def test_data_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", 6)
    for path in (tmp_path / "data").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(WanmaError, match="none of 32 other samples"):
        opened(tmp_path, bad_data="substitute").batch([0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"-1", "the label is -1; classes count from 0"),
        (b"1.5", "holds both numbers and names"),
        (b"", "is no class: ''"),
    ],
)
def test_a_label_that_is_no_class_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    write_samples(tmp_path / "data" / "a.tar", map(picture, range(4)), [1, 1, content, 1])
    with pytest.raises(WanmaError, match=message):
        opened(tmp_path)


def test_a_store_gives_the_same_samples_and_each_block_leaves_it_once(tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data", COUNT)
    for path in sorted((tmp_path / "data").iterdir()):
        s3.put(f"images/{path.name}", path.read_bytes())
    local = opened(tmp_path)
    keys = {"validation_fraction": 0.0, "cache": str(tmp_path / "remote-cache"), "workers": 2}
    remote = open_dataset(DataSection(images=["s3://bucket/images"], **keys), TRAIN)
    assert remote.loader_threads == 3
    with StepLoader(remote, Plan(micro_batch=8), TRAIN, 0, 0, prefetch=4) as steps:
        for step in steps:
            expected = local.batch(range(8 * step.step, 8 * step.step + 8))
            assert torch.equal(step.micro_batches[0].inputs[0], expected.inputs[0])
            assert torch.equal(step.micro_batches[0].targets, expected.targets)
    assert len(s3.proxy.ranged_requests) == 2, "one block a shard"
    assert remote.fingerprint == local.fingerprint


def test_files_of_an_image_folder_in_a_store_are_read_side_by_side(tmp_path: Path, s3: S3Server) -> None:
    write_folder(tmp_path / "data", COUNT)
    for path in sorted((tmp_path / "data").rglob("*.png")):
        s3.put(f"folder/{path.parent.name}/{path.name}", path.read_bytes())
    data = open_dataset(
        DataSection(
            images=["s3://bucket/folder"], validation_fraction=0.0, cache=str(tmp_path / "c"), cache_bytes=0
        ),
        TRAIN,
    )
    barrier = threading.Barrier(4, timeout=30)  # passes only when four requests are there together
    numbers = itertools.count()

    def wait(request: Any) -> None:
        if request.is_ranged and next(numbers) < 4:
            barrier.wait()

    s3.proxy.fault = wait
    assert sorted(data.batch(range(8)).targets.tolist()) == sorted(
        opened(tmp_path).batch(range(8)).targets.tolist()
    )
    assert next(numbers) == 8


def test_large_remote_data_needs_classes_in_the_job(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fields, "_SCANNED_BYTES", 1000)
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data", COUNT)
    for path in sorted((tmp_path / "data").iterdir()):
        s3.put(f"large/{path.name}", path.read_bytes())
    keys = {"validation_fraction": 0.0, "cache": str(tmp_path / "c")}
    data = open_dataset(DataSection(images=["s3://bucket/large"], **keys), TRAIN)
    assert data.classes is None
    assert data.batch(range(COUNT)).targets.max() == 2
    keys["columns"] = {"target": "__key__"}
    with pytest.raises(JobError, match="the field '__key__' holds names"):
        open_dataset(DataSection(images=["s3://bucket/large"], **keys), TRAIN)
