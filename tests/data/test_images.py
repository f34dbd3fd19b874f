"""Labelled images in the formats that they are published in."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest

from wanma.data.datasets.image_dataset import ImageDataset
from wanma.data.images.image_files import find_image_files, read_image_files
from wanma.data.opening import open_dataset
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

RANDOM = np.random.default_rng(0)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def save(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def random_images(count: int, height: int = 6, width: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return (
        RANDOM.integers(0, 256, (count, height, width), dtype=np.uint8),
        RANDOM.integers(0, 10, count, dtype=np.uint8),
    )


def mnist(folder: Path, ending: str, names: tuple[str, ...] = ("train", "t10k")) -> list[np.ndarray]:
    arrays = []
    for name, count in zip(names, (30, 8), strict=False):
        images, labels = random_images(count)
        save(folder / f"{name}-images-idx3-ubyte{ending}", idx(images))
        save(folder / f"{name}-labels-idx1-ubyte{ending}", idx(labels))
        arrays += [images, labels]
    return arrays


def opened(path: Path, fraction: float = 0.1) -> ImageDataset:
    return open_dataset(DataSection(images=str(path), validation_fraction=fraction), TrainSection())


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_files_are_found_by_their_names(tmp_path: Path, ending: str) -> None:
    images, labels, test_images, test_labels = mnist(tmp_path, ending)
    train, test = read_image_files(str(tmp_path))
    assert np.array_equal(train.images, images[:, None])
    assert train.labels.tolist() == labels.tolist()
    assert np.array_equal(test.images, test_images[:, None])
    assert test.labels.tolist() == test_labels.tolist()


def test_one_idx_file_is_read_with_its_labels(tmp_path: Path) -> None:
    images, labels = mnist(tmp_path, "", ("train",))
    train, test = read_image_files(str(tmp_path / "train-images-idx3-ubyte"))
    assert test is None
    assert np.array_equal(train.images[:, 0], images)
    assert train.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("inside", ["", "cifar-10-batches-bin"])
def test_cifar_batches_are_joined_in_order(tmp_path: Path, ending: str, inside: str) -> None:
    records = [RANDOM.integers(0, 10, (4, 3073), dtype=np.uint8) for _ in range(3)]
    for name, record in zip(("data_batch_1", "data_batch_2", "test_batch"), records, strict=True):
        save(tmp_path / inside / f"{name}.bin{ending}", record.tobytes())
    train, test = read_image_files(str(tmp_path))
    assert train.images.shape == (8, 3, 32, 32)
    assert np.array_equal(train.images.reshape(8, -1), np.concatenate(records[:2])[:, 1:])
    assert train.labels.tolist() == np.concatenate(records[:2])[:, 0].tolist()
    assert len(test.labels) == 4


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((9, 6, 5), (1, 6, 5)), ((9, 6, 5, 3), (3, 6, 5)), ((9, 3, 6, 5), (3, 6, 5))],
)
def test_npz_arrays_become_channels_first(
    tmp_path: Path, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    images = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(9)[:, None] % 3)
    train, test = read_image_files(str(tmp_path / "x.npz"))
    assert test is None
    assert train.images.shape[1:] == expected
    assert train.labels.tolist() == [0, 1, 2] * 3
    if len(shape) == 4 and shape[3] == 3:
        assert np.array_equal(train.images[2, 1], images[2, :, :, 1])


def test_batches_are_normalized_by_the_training_set(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (40, 4, 4, 3), dtype=np.uint8)
    images[..., 2] = 7  # a constant channel must not divide by zero
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(40) % 2)
    data = opened(tmp_path / "x.npz", 0)
    batch = data.batch(range(40))
    pixels = batch.inputs[0].numpy()
    assert pixels.dtype == np.float32
    assert pixels.shape == (40, 3, 4, 4)
    assert pixels.mean(axis=(0, 2, 3)) == pytest.approx([0, 0, 0], abs=1e-5)
    assert pixels.std(axis=(0, 2, 3)) == pytest.approx([1, 1, 0], abs=1e-5)
    assert sorted(batch.targets.tolist()) == [0] * 20 + [1] * 20
    assert (data.image_shape, data.classes, data.input_kind) == ((3, 4, 4), 2, "images")


def test_the_test_set_is_the_validation_set(tmp_path: Path) -> None:
    mnist(tmp_path, "")
    data = opened(tmp_path)
    assert (data.train_samples, data.validation_samples) == (30, 8)
    assert data.validation_batch(range(8)).targets.shape == (8,)


def test_without_a_test_set_equal_images_stay_on_one_side(tmp_path: Path) -> None:
    images, _ = random_images(200)
    np.savez(tmp_path / "x.npz", images=np.concatenate([images, images]), labels=np.arange(400) % 200)
    data = opened(tmp_path / "x.npz", 0.2)
    train = set(data.batch(range(data.train_samples)).targets.tolist())
    validation = set(data.validation_batch(range(data.validation_samples)).targets.tolist())
    assert not train & validation
    assert len(train) + len(validation) == 200
    assert 0.1 < data.validation_samples / 400 < 0.3


def test_a_folder_with_only_a_test_set_is_divided(tmp_path: Path) -> None:
    mnist(tmp_path, ".gz", ("t10k",))
    data = opened(tmp_path)
    assert data.train_samples + data.validation_samples == 30
    assert data.validation_samples >= 1


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    images, labels = random_images(20)
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    np.savez(tmp_path / "b.npz", images=images, labels=(labels + 1) % 10)
    assert opened(tmp_path / "a.npz").fingerprint == opened(tmp_path / "a.npz").fingerprint
    assert opened(tmp_path / "a.npz").fingerprint != opened(tmp_path / "b.npz").fingerprint


def test_what_is_not_there_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"data\.images: '/no/such' does not exist"):
        read_image_files("/no/such")
    with pytest.raises(JobError, match=r"data\.images"):
        find_image_files(str(tmp_path))
    save(tmp_path / "picture.png", b"")
    with pytest.raises(JobError, match=r"data\.images: '.*picture\.png' contains"):
        find_image_files(str(tmp_path / "picture.png"))
    save(tmp_path / "train-images-idx3-ubyte", b"")
    with pytest.raises(JobError, match=r"data\.images: .*label file .*idx3-ubyte"):
        find_image_files(str(tmp_path))
    save(tmp_path / "letters-train-images-idx3-ubyte", b"")
    with pytest.raises(JobError, match=r"data\.images"):
        find_image_files(str(tmp_path))


def test_a_file_and_its_compressed_copy_count_once(tmp_path: Path) -> None:
    images, *_ = mnist(tmp_path / "mnist", "")
    mnist(tmp_path / "mnist", ".gz")
    assert np.array_equal(read_image_files(str(tmp_path / "mnist"))[0].images[:, 0], images)
    for folder, ending in (("cifar", ""), ("cifar", ".gz"), ("cifar/cifar-10-batches-bin", "")):
        save(tmp_path / folder / f"data_batch_1.bin{ending}", bytes(3073 * 2))
    assert len(read_image_files(str(tmp_path / "cifar"))[0].labels) == 2


def test_a_file_that_is_no_archive_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(WanmaError, match=r"data\.images: '.*x\.npz' .* archive"):
        read_image_files(str(tmp_path / "x.npz"))


def test_npz_with_pickled_objects_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "ran",))  # type: ignore[return-value]

    np.savez(tmp_path / "x.npz", images=np.array([Bomb()], dtype=object), labels=np.zeros(1, int))
    with pytest.raises(WanmaError, match=r"data\.images: '.*x\.npz' .*allow_pickle"):
        read_image_files(str(tmp_path / "x.npz"))
    assert not (tmp_path / "ran").exists()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


PIXELS, CIFAR = np.zeros((2, 3, 3), np.uint8), RANDOM.integers(0, 10, 3073 * 2, dtype=np.uint8).tobytes()
ARCHIVE = npz(images=np.zeros((9, 4, 4), np.uint8), labels=np.zeros(9, int))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", b"", "does not have the header of an IDX file"),
        ("train-images-idx3-ubyte", b"\0\0\x08\x03\0\0", "cannot be read"),
        ("train-images-idx3-ubyte", idx(PIXELS)[:-1], r"17 bytes of values for the shape"),
        ("train-images-idx3-ubyte", idx(PIXELS[:1]), r"images of shape \(1, 1, 3, 3\) with lab"),
        ("data_batch_1.bin", CIFAR[:-100], r"data\.images: '.*data_batch_1\.bin.*'"),
        ("data_batch_1.bin.gz", gzip.compress(CIFAR)[:-20], r"data\.images: '.*data_batch_1\.bin.*'"),
        ("data_batch_1.bin", bytes([77]) * 3073, "a label is 77"),
        ("x.npz", ARCHIVE[:-10], r"data\.images: '.*x\.npz' cannot be read"),
        ("x.npz", ARCHIVE[:-400], r"data\.images: '.*x\.npz' cannot be read"),
    ],
)
def test_damaged_files_are_told(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    if "idx3" in name:
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(2, np.uint8)))
    with pytest.raises(WanmaError, match=message):
        read_image_files(str(tmp_path))


def test_files_without_an_image_are_told(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(PIXELS[:0]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(0, np.uint8)))
    with pytest.raises(WanmaError, match="it contains no image"):
        read_image_files(str(tmp_path))


PICTURES, LABELS = np.zeros((3, 4, 4), np.uint8), np.zeros(3, int)


@pytest.mark.parametrize(
    ("arrays", "fact"),
    [
        ({"data": np.zeros(3)}, "the arrays data of"),
        ({"images": np.zeros((3, 4, 4), np.int64), "labels": LABELS}, "images has dtype int64"),
        ({"images": PICTURES, "labels": np.zeros(3)}, "labels has dtype float64"),
        ({"images": PICTURES, "labels": np.array([0, 1, -1])}, "a label is -1"),
        ({"images": np.zeros((3, 16), np.uint8), "labels": LABELS}, r"images of shape \(3, 16\)"),
        (
            {"x_train": PICTURES, "y_train": LABELS, "x_test": PICTURES[:, 1:], "y_test": LABELS},
            r"\(1, 4, 4\) .* but \(1, 3, 4\)",
        ),
    ],
)
def test_arrays_that_are_no_images_are_told(tmp_path: Path, arrays: dict[str, np.ndarray], fact: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]  # names of arrays, not of arguments
    with pytest.raises(WanmaError, match=fact):
        read_image_files(str(tmp_path / "x.npz"))


REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not (REAL / "mnist-t10k-images-idx3-ubyte.gz").exists(), reason="no ../shared/data here")
def test_the_real_mnist_test_set_is_read() -> None:
    data = opened(REAL / "mnist-t10k-images-idx3-ubyte.gz", 0.1)
    assert (data.image_shape, data.classes) == ((1, 28, 28), 10)
    assert data.train_samples + data.validation_samples == 10_000
    assert 900 < data.validation_samples < 1100
    # the published mean and deviation of MNIST's training set are 0.1307 and 0.3081
    assert data.describe()["mean"][0] / 255 == pytest.approx(0.1307, abs=0.005)
    assert data.describe()["standard_deviation"][0] / 255 == pytest.approx(0.3081, abs=0.005)
