"""Mixtures of images: classes in common, holdout of each source, damaged images, refusals by their key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from support.labelled_images import CLASSES, SIZE, picture, write_folder, write_samples, write_tar
from support.s3_server import S3Server
from wanma.data.datasets.stored_image_dataset import StoredImageDataset
from wanma.data.formats.format import BadDataError
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.tools.selection import FormatChoice, select_job_data
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=10, global_batch=8, seed=3)


def section(folder: Path, *sources: dict[str, Any], **keys: Any) -> DataSection:
    """Data of sources in folders of their own name."""
    keys = {"validation_fraction": 0.0, "cache": str(folder / "cache"), **keys}
    full = [{"images": [str(folder / source["name"])], **source} for source in sources]
    return DataSection(sources=full, **keys)


def opened(folder: Path, *sources: dict[str, Any], **keys: Any) -> StoredImageDataset:
    return open_dataset(section(folder, *sources, **keys), TRAIN)


def write_classes(folder: Path, classes: dict[str, int], size: int = SIZE) -> None:
    """Write an image folder with one image a class, of the shade of the number that the class has."""
    for name, number in classes.items():
        path = folder / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, size=(size, size)))


def write_labels(folder: Path, labels: list[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = [picture(50 + number) for number in range(len(labels))]
    pq.write_table(pa.table({"png": images, "label": labels}), folder / "a.parquet")


def numbers_and_targets(data: StoredImageDataset, count: int) -> dict[int, int]:
    """Number of each image among the first `count` samples, by its shade, and its target."""
    batch, facts = data.batch(range(count)), data.describe()
    reds = batch.inputs[0][:, 0].flatten(1).median(1).values
    shades = (reds * facts["standard_deviation"][0] + facts["mean"][0]) * 255
    return {round(one / 3): int(target) for one, target in zip(shades.tolist(), batch.targets, strict=True)}


def test_classes_of_one_name_are_one_class_over_all_sources(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", {"ant": 1, "cat": 2})
    write_classes(tmp_path / "b", {"bee": 3, "cat": 4, "dog": 5})
    write_labels(tmp_path / "c", [2, 0, 1])
    data = opened(tmp_path, {"name": "a"}, {"name": "b"}, {"name": "c", "class_names": ["dog", "yak", "ant"]})
    assert data.classes == 5
    assert data.describe()["class_names"] == ["ant", "bee", "cat", "dog", "yak"]
    expected = {1: 0, 2: 2, 3: 1, 4: 2, 5: 3, 50: 0, 51: 3, 52: 4}
    assert numbers_and_targets(data, 60) == expected


def test_classes_that_are_numbers_are_the_same_where_the_numbers_are(tmp_path: Path) -> None:
    write_labels(tmp_path / "a", [0, 2])
    write_labels(tmp_path / "b", [5, 1, 1])
    data = opened(tmp_path, {"name": "a"}, {"name": "b"})
    assert data.classes == 6
    assert set(data.batch(range(12)).targets.tolist()) == {0, 1, 2, 5}


@pytest.mark.parametrize(
    ("labels", "keys", "message", "hint"),
    [
        (
            [0, 1],
            {},
            r"the classes of 'a' have names, such as ant, .* those of 'b' are numbers",
            "class_names",
        ),
        (
            [0, 2],
            {"class_names": ["ant", "cat"]},
            r"class_names has 2 names, and a label is 2",
            "all 3",
        ),
        (["ant", "x"], {"class_names": ["ant", "x"]}, r"the labels are names already: ant, x", "remove"),
    ],
)
def test_classes_that_contradict_are_refused(
    tmp_path: Path, labels: list[Any], keys: dict[str, Any], message: str, hint: str
) -> None:
    write_classes(tmp_path / "a", {"ant": 1, "cat": 2})
    write_labels(tmp_path / "b", labels)
    with pytest.raises(JobError, match=message) as raised:
        prepare_job_data(section(tmp_path, {"name": "a"}, {"name": "b", **keys}))
    assert hint in raised.value.hint


def test_sources_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", {"ant": 1, "cat": 2})
    write_classes(tmp_path / "b", {"ant": 3, "cat": 4}, size=20)
    sources = {"name": "a"}, {"name": "b"}
    with pytest.raises(JobError, match=r"'a' has 12 x 12 .* 'b' 20 x 20") as raised:
        opened(tmp_path, *sources)
    assert "data.image_transform.size" in raised.value.hint
    data = opened(tmp_path, *sources, image_transform={"size": 8})
    assert data.batch(range(8)).inputs[0].shape == (8, 3, 8, 8)


def test_a_message_names_the_source_by_its_key(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", {"ant": 1, "bee": 2})
    write_labels(tmp_path / "b", ["ant", "cat"])
    with pytest.raises(JobError, match=r"sources\[1\]\.columns\.target = 'kind'") as raised:
        opened(tmp_path, {"name": "a"}, {"name": "b", "columns": {"target": "kind"}})
    assert "data.sources[1].columns.target" in raised.value.hint
    with pytest.raises(JobError, match=r"data\.sources\[1\]\.images"):
        opened(tmp_path, {"name": "a"}, {"name": "missing"})


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_each_source_keeps_a_share_for_validation(tmp_path: Path, shuffle: str) -> None:
    write_labels(tmp_path / "a", list(range(20)))
    write_labels(tmp_path / "b", list(range(20, 60)))
    sources = {"name": "a", "weight": 3}, {"name": "b"}
    data = opened(tmp_path, *sources, validation_fraction=0.1, shuffle=shuffle, block_samples=4)
    assert (data.train_samples, data.validation_samples) == (54, 6)
    held_out = data.validation_batch(range(6)).targets.tolist()
    assert len(set(held_out)) == 6
    assert sum(target < 20 for target in held_out) == 2
    trained = set(data.batch(range(200)).targets.tolist())
    assert trained == set(range(60)) - set(held_out)


def test_a_source_with_splits_of_its_own_keeps_them(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "train", 9)
    write_classes(tmp_path / "a" / "val", {CLASSES[0]: 70, CLASSES[1]: 71})
    write_labels(tmp_path / "b", ["ant", "bee"] * 10)
    data = opened(tmp_path, {"name": "a"}, {"name": "b"}, validation_fraction=0.1)
    assert [one["validation_samples"] for one in data.describe()["sources"]] == [2, 2]
    assert [one["train_samples"] for one in data.describe()["sources"]] == [9, 18]
    assert sorted(data.validation_batch(range(4)).targets.tolist())[:1] == [0]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_mnist_and_npz_are_sources_with_their_test_sets(tmp_path: Path) -> None:
    pixels = np.arange(40 * SIZE * SIZE, dtype=np.int64).reshape(40, SIZE, SIZE).astype("u1")
    (tmp_path / "mnist").mkdir()
    for name, rows in (("train", slice(0, 12)), ("t10k", slice(12, 16))):
        (tmp_path / "mnist" / f"{name}-images-idx3-ubyte").write_bytes(idx(pixels[rows]))
        labels = np.arange(40, dtype="u1")[rows]
        (tmp_path / "mnist" / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    archive = tmp_path / "more.npz"
    arrays = {"x_train": pixels[16:30], "y_train": np.arange(16, 30), "x_test": pixels[30:33]}
    np.savez(archive, **arrays, y_test=np.array([1, 2, 3]))
    data = opened(tmp_path, {"name": "mnist"}, {"name": "more", "images": [str(archive)]})
    assert (data.train_samples, data.validation_samples) == (26, 7)
    assert data.image_shape == (1, SIZE, SIZE)
    batch = data.batch(range(60))
    assert set(batch.targets.tolist()) == set(range(12)) | set(range(16, 30))
    for values, target in zip(batch.inputs[0], batch.targets.tolist(), strict=True):
        assert torch.allclose(values[0] * 0.5 + 0.5, torch.from_numpy(pixels[target]) / 255, atol=1e-6)
    assert sorted(data.validation_batch(range(7)).targets.tolist()) == [1, 2, 3, 12, 13, 14, 15]


def damaged_tar(folder: Path, first: int) -> None:
    """Write ten samples labelled from `first` on, of which number 4 has a cut image."""
    images = [picture(number) for number in range(10)]
    images[4] = images[4][:-30]
    write_samples(folder / "a.tar", images, range(first, first + 10))


def test_a_damaged_image_is_replaced_by_one_of_its_source(tmp_path: Path) -> None:
    damaged_tar(tmp_path / "a", 0)
    damaged_tar(tmp_path / "b", 10)
    sources = {"name": "a"}, {"name": "b"}
    with pytest.raises(BadDataError, match=r"a\.tar: row 4: the image"):
        opened(tmp_path, *sources).batch(range(20))
    skipped = opened(tmp_path, *sources, bad_data="skip").batch(range(20))
    replaced = opened(tmp_path, *sources, bad_data="substitute").batch(range(20))
    assert [one.place.rpartition("/")[2] for one in skipped.bad_samples] == ["a.tar: row 4"] * 2
    bad = [one.sample for one in replaced.bad_samples]
    assert bad == skipped.samples.eq(-1).nonzero().flatten().tolist()
    places = {one.sample: one.place for one in replaced.bad_samples}
    for sample in bad:
        assert (int(replaced.targets[sample]) < 10) == ("/a/a.tar" in places[sample])
        assert int(replaced.targets[sample]) % 10 != 4
    data = opened(tmp_path, *sources, bad_data="skip")
    assert {data.sample_name(sample) for sample in bad} == set(places.values())


def test_the_sources_are_selected_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "train", 9)
    write_folder(tmp_path / "a" / "val", 6)
    write_labels(tmp_path / "b", ["ant", "bee"])
    data = section(tmp_path, {"name": "a", "weight": 3}, {"name": "b"})
    sources = select_job_data(data, FormatChoice(), None).sources
    assert [(one.name, len(one.files)) for one in sources] == [("a/train", 9), ("a/validation", 6), ("b", 1)]


def test_sources_of_a_store_and_of_a_disk_mix(tmp_path: Path, s3: S3Server) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name, 12)
    for name in ("b", "c"):
        for path in sorted((tmp_path / name).iterdir()):
            s3.put(f"{name}/{path.name}", path.read_bytes())
    names = [{"name": name} for name in "abc"]
    local = opened(tmp_path, *names)
    stored = [names[0], *({"name": name, "images": [f"s3://bucket/{name}"]} for name in "bc")]
    remote = opened(tmp_path, *stored, workers=2)
    assert remote.loader_threads == 3
    assert remote.fingerprint == local.fingerprint
    for start in (0, 7, 30):
        expected, found = (data.batch(range(start, start + 9)) for data in (local, remote))
        assert torch.equal(expected.inputs[0], found.inputs[0])
        assert torch.equal(expected.targets, found.targets)
    cost = remote.sample_loading()
    assert (cost.samples, cost.is_remote) == (36, True)
    assert cost.decode_seconds is not None
    stored = sum(path.stat().st_size for name in "bc" for path in (tmp_path / name).iterdir())
    assert cost.cached_bytes == cost.store_bytes == stored, "all has been read"
