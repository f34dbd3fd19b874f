"""Images in stored files of any format: the same samples in the same order, whoever reads them."""

from __future__ import annotations

import itertools
import json
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.data_files import add_member
from support.labelled_images import (
    CLASSES,
    SIZE,
    WRITERS,
    label,
    picture,
    shade,
    write_folder,
    write_huggingface,
    write_tar,
)
from support.s3_server import S3Server, s3_server
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
    data = open_dataset(section(folder, *names, **keys), TRAIN)
    assert isinstance(data, StoredImageDataset)
    return data


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


def sequence(data: StoredImageDataset, plan: Plan, workers: int, start: int) -> list[list[torch.Tensor]]:
    """Return rows of each step of all ranks in the order of their sample indices: pixels and targets."""
    ranks = []
    for rank in range(plan.data_parallel_size):
        with StepLoader(data, plan, TRAIN, rank, start, prefetch=3, threads=workers) as steps:
            ranks.append(list(steps))
    found = []
    for parts in zip(*ranks, strict=True):
        batches = [batch for part in parts for batch in part.micro_batches]
        real = torch.cat([batch.real for batch in batches])
        samples = torch.cat([batch.samples for batch in batches])[real]
        order = samples.argsort()
        pixels = torch.cat([batch.inputs[0] for batch in batches])[real][order]
        found.append([samples[order], pixels, torch.cat([batch.targets for batch in batches])[real][order]])
    return found


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_world_size_workers_and_resume_change_no_sample(
    write: Callable[[str], Path], ranks: int, workers: int, start: int
) -> None:
    transform = {"size": 8, "augment": ["random_resized_crop", "horizontal_flip"]}
    folder = write("webdataset")
    by_hand = opened(folder, image_transform=transform)
    plan = Plan(dp_replicate=ranks, micro_batch=2)
    steps = sequence(opened(folder, image_transform=transform, workers=workers), plan, workers, start)
    assert len(steps) == TRAIN.steps - start
    for number, (samples, pixels, targets) in enumerate(steps, start):
        expected = range(8 * number, 8 * (number + 1))
        assert samples.tolist() == list(expected)
        reference = by_hand.batch(expected)
        assert torch.equal(pixels, reference.inputs[0])
        assert torch.equal(targets, reference.targets)
        assert targets.tolist() == [label(one) for one in reference_order(expected)]


def test_augmentation_differs_between_epochs_and_not_in_validation(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (COUNT, 20, 20, 3)).astype("u1")
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number, pixels in enumerate(noise):
            add_member(archive, f"{number}.png", _png(pixels))
            add_member(archive, f"{number}.cls", str(number).encode())
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


def test_gray_images_have_one_channel_and_become_rgb_on_request(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number in range(4):
            add_member(archive, f"{number}.png", _png(np.full((5, 5), 10 * number, "u1")))
            add_member(archive, f"{number}.cls", b"0")
    assert opened(tmp_path).image_shape == (1, 5, 5)
    colored = opened(tmp_path, image_transform={"channels": 3, "mean": [0], "std": [1]})
    pixels = colored.batch(range(4)).inputs[0]
    assert pixels.shape == (4, 3, 5, 5)
    assert torch.equal(pixels[:, 0], pixels[:, 2])


def test_a_colored_image_among_gray_ones_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number in range(100):
            image = picture(3, size=(5, 5)) if number == 5 else _png(np.full((5, 5), number, "u1"))
            add_member(archive, f"{number:03d}.png", image)
            add_member(archive, f"{number:03d}.cls", b"0")
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


def test_names_of_classes_get_numbers_in_alphabetical_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    table = pa.table(
        {
            "png": [picture(number) for number in range(6)],
            "species": ["yak", "ant", "yak", "cow", "ant", "ant"],
        }
    )
    pq.write_table(table, tmp_path / "data" / "a.parquet")
    with pytest.raises(JobError, match=r"no class .* have png, species"):
        opened(tmp_path)
    data = opened(tmp_path, columns={"target": "species"})
    batch = data.batch(range(6))
    found = dict(zip(numbers_of(batch.inputs[0], data), batch.targets.tolist(), strict=True))
    assert found == {0: 2, 1: 0, 2: 2, 3: 1, 4: 0, 5: 0}
    assert data.classes == 3


def test_classes_that_are_digits_in_text_have_the_order_of_their_values(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = ["10", "2", "1", "10", "07"]
    images = [picture(number) for number in range(len(names))]
    pq.write_table(pa.table({"png": images, "label": names}), tmp_path / "data" / "a.parquet")
    data = opened(tmp_path)
    batch = data.batch(range(len(names)))
    found = dict(zip(numbers_of(batch.inputs[0], data), batch.targets.tolist(), strict=True))
    assert found == {0: 3, 1: 1, 2: 0, 3: 3, 4: 2}
    assert data.classes == 4


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
    assert source.images.classes.count == 3
    size = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert seen[-1] == (size, size)
    of_labels = seen[len(seen) - (COUNT + 3) // 4 :]
    assert of_labels == sorted(of_labels)
    assert next(numbers) == (COUNT + 3) // 4, "each part is read once"


def damaged_tar(folder: Path) -> None:
    """Write 30 samples of which number 4 has a cut image, and 11 a text instead of one."""
    (folder / "data").mkdir()
    with tarfile.open(folder / "data" / "a.tar", "w") as archive:
        for number in range(COUNT):
            image = picture(number)
            image = image[: len(image) - 30] if number == 4 else b"text" if number == 11 else image
            add_member(archive, f"{number:04d}.png", image)
            add_member(archive, f"{number:04d}.cls", str(label(number)).encode())


def test_a_damaged_image_is_refused_with_its_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number in range(COUNT):
            image = picture(number)
            add_member(archive, f"{number:04d}.png", image[: len(image) - 30] if number == 4 else image)
            add_member(archive, f"{number:04d}.cls", b"1")
    with pytest.raises(BadDataError, match=r"a\.tar: row 4: the image") as raised:
        opened(tmp_path).batch(range(COUNT))
    assert "data.bad_data" in raised.value.hint
    failure = failure_from_exception(raised.value, 0, 0, "host", "log")
    assert not RestartPolicy(max_restarts=3).allows_restart(failure), "the data stay as they are"


def test_a_file_that_is_left_out_as_a_whole_is_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            for number in range(COUNT):
                add_member(archive, f"{number:04d}.png", picture(number))
                add_member(archive, f"{number:04d}.cls", b"1")
    names = ("a.tar", "b.tar")
    assert opened(tmp_path, *names, bad_data="skip").bad_data_note == ""
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) // 2 + 100])
    with pytest.raises(BadDataError, match=r"a\.tar: ") as raised:
        opened(tmp_path, *names)
    assert "data.bad_data" in raised.value.hint
    data = opened(tmp_path, *names, bad_data="skip")
    assert data.train_samples == COUNT
    assert "1 in all" in data.bad_data_note
    assert "a.tar: " in data.bad_data_note
    assert data.bad_file_count == 1


def test_whole_files_count_for_the_limit_of_bad_data(tmp_path: Path) -> None:
    names = ("a.tar", "b.tar", "c.tar")
    (tmp_path / "data").mkdir()
    for name in names:
        with tarfile.open(tmp_path / "data" / name, "w") as archive:
            for number in range(4):
                add_member(archive, f"{number}.png", picture(number))
                add_member(archive, f"{number}.cls", b"1")
    for name in names[:2]:
        path = tmp_path / "data" / name
        path.write_bytes(path.read_bytes()[:700])
    assert opened(tmp_path, bad_data="skip", bad_data_limit=2).bad_file_count == 2
    keys = section(tmp_path, bad_data="skip", bad_data_limit=1)
    with pytest.raises(JobError, match=rf"bad_data_limit: 2 .* 1; .*{names[0]}: "):
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
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number in range(4):
            add_member(archive, f"{number}.png", b"no image")
            add_member(archive, f"{number}.cls", b"1")
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
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as archive:
        for number in range(4):
            add_member(archive, f"{number}.png", picture(number))
            add_member(archive, f"{number}.cls", content if number == 2 else b"1")
    with pytest.raises(WanmaError, match=message):
        opened(tmp_path)


def test_text_is_refused_as_images(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(json.dumps({"text": "x", "label": 1}) + "\n")
    with pytest.raises(JobError, match=r"data\.images"):
        prepare_job_data(section(tmp_path))


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    prints = []
    for folder, count in (("a", COUNT), ("b", COUNT), ("c", COUNT - 1)):
        (tmp_path / folder / "data").mkdir(parents=True)
        write_tar(tmp_path / folder / "data", count)
        prints.append(opened(tmp_path / folder).fingerprint)
    assert prints[0] == prints[1] != prints[2]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Any:
    with s3_server(monkeypatch) as server:
        yield server


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


def test_blocks_of_neighbours_are_read_together(write: Callable[[str], Path]) -> None:
    keys = {"shuffle": "block", "block_samples": 5, "window_blocks": 1}
    data = opened(write("parquet"), **keys)
    numbers = numbers_of(data.batch(range(COUNT)).inputs[0], data)
    assert sorted(numbers) == list(range(COUNT))
    assert numbers != sorted(numbers)
    assert all(
        len({number // 5 for number in numbers[start : start + 5]}) == 1 for start in range(0, COUNT, 5)
    )
    in_order = opened(write("parquet"), shuffle="none")
    assert numbers_of(in_order.batch(range(COUNT)).inputs[0], in_order) == list(range(COUNT))


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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"augment": ["random_resized_crop"]}, "random_resized_crop needs a size"),
        ({"mean": [0.5, 0.5]}, "mean has 2 values"),
        ({"std": [0.0]}, "each std must be > 0"),
    ],
)
def test_a_transform_that_cannot_be_is_refused_in_the_job_file(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSection(images=["a"], image_transform=keys)
