"""Archives in a store that are read as their turn comes: the same samples, from the first archives on."""

import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from support.data_files import add_member
from support.labelled_images import label, picture
from support.s3_server import S3Server
from wanma.data.datasets.stored_image_dataset import StoredImageDataset
from wanma.data.formats.format import BadDataError
from wanma.data.index.gradual_index import FileScans
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.step_loader import StepLoader
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

SIZES = (7, 3, 9, 5, 4, 8, 6, 2)
TRAIN = TrainSection(steps=14, global_batch=6, seed=5)  # nearly two epochs


@pytest.fixture
def folder(tmp_path: Path, s3: S3Server) -> Path:
    """Write the same archives to a folder and to the store."""
    (tmp_path / "data").mkdir()
    for shard, size in enumerate(SIZES):
        path = tmp_path / "data" / f"{shard}.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(sum(SIZES[:shard]), sum(SIZES[:shard]) + size):
                add_member(archive, f"{number:04}.png", picture(number))
                add_member(archive, f"{number:04}.cls", str(label(number)).encode())
        s3.put(f"data/{path.name}", path.read_bytes())
    return tmp_path


def opened(entry: str, cache: Path, **keys: Any) -> StoredImageDataset:
    keys = {"shuffle": "block", "block_samples": "file", "window_blocks": 2, **keys}
    section = DataSection(images=[entry], cache=str(cache), **{"validation_fraction": 0.0, **keys})
    prepare_job_data(section)
    data = open_dataset(section, TRAIN)
    assert isinstance(data, StoredImageDataset)
    return data


def steps_of(data: StoredImageDataset, ranks: int, start: int = 0) -> list[torch.Tensor]:
    """Return the pixels of each step in the order of the samples."""
    plan, found = Plan(dp_replicate=ranks, micro_batch=6 // ranks), []
    for rank in range(ranks):
        with StepLoader(data, plan, TRAIN, rank, start, prefetch="auto") as steps:
            found.append([torch.cat([one.inputs[0] for one in step.micro_batches]) for step in steps])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize(("ranks", "start"), [(1, 0), (2, 0), (3, 9)])
def test_a_cold_store_gives_the_samples_of_local_files(
    folder: Path, s3: S3Server, ranks: int, start: int
) -> None:
    local = steps_of(opened(str(folder / "data"), folder / "local"), 1)
    remote = opened("s3://bucket/data", folder / "cold")
    assert torch.equal(torch.stack(steps_of(remote, ranks, start)), torch.stack(local[start:]))
    assert len(s3.proxy.ranged_requests) == len(SIZES), "each archive leaves the store once"
    again = opened("s3://bucket/data", folder / "cold")
    assert (again.fingerprint, again.order_identity) == (remote.fingerprint, remote.order_identity)
    assert torch.equal(torch.stack(steps_of(again, 1)), torch.stack(local))
    assert len(s3.proxy.ranged_requests) == len(SIZES)


def test_the_first_batch_waits_for_the_first_window_alone(folder: Path, s3: S3Server) -> None:
    data = opened(str(folder / "data"), folder / "local")
    needed = {f"{number}.tar" for number in (0, *data.order.file_orders[0].files(0)[:2].tolist())}
    expected = data.batch(range(6))
    gate = threading.Event()

    def hold_back(request: Any) -> None:
        if request.is_ranged and request.path.rpartition("/")[2].partition("?")[0] not in needed:
            assert gate.wait(60)

    s3.proxy.fault = hold_back
    remote = opened("s3://bucket/data", folder / "cold")
    try:
        assert torch.equal(remote.batch(range(6)).inputs[0], expected.inputs[0])
        assert not gate.is_set()
    finally:
        gate.set()
    assert len(remote.batch(range(sum(SIZES))).samples) == sum(SIZES)


def test_a_damaged_archive_is_named_when_its_turn_comes(folder: Path, s3: S3Server) -> None:
    data = opened(str(folder / "data"), folder / "local")
    *first, last = data.order.file_orders[0].files(0).tolist()
    archive = (folder / "data" / f"{last}.tar").read_bytes()
    s3.put(f"data/{last}.tar", archive[:1000])
    assert last, "the first file of the listing is read at the opening"
    remote = opened("s3://bucket/data", folder / "cold")
    before = sum(SIZES[file] for file in first[:-1])
    whole = remote.batch(range(before))
    with pytest.raises(BadDataError, match=rf"{last}\.tar") as raised:
        remote.batch(range(sum(SIZES)))
    assert raised.value.exit_code == EXIT_USAGE
    skipping = opened("s3://bucket/data", folder / "cold", bad_data="skip")
    assert skipping.fingerprint == remote.fingerprint
    assert skipping.order_identity == remote.order_identity
    assert torch.equal(skipping.batch(range(before)).inputs[0], whole.inputs[0])


def test_what_needs_all_samples_is_refused_with_its_key(folder: Path) -> None:
    with pytest.raises(JobError, match=r"data\.validation_fraction"):
        opened("s3://bucket/data", folder / "cold", validation_fraction=0.1)
    with pytest.raises(ValidationError, match="block_samples"):
        DataSection(text=["stdlib"], shuffle="block", block_samples="file")


def test_scans_follow_the_order_of_need_and_stay_within_their_bytes() -> None:
    allowed = {file: threading.Event() for file in range(10)}
    begun: list[int] = []
    changed = threading.Condition()

    def scan(file: int) -> int:
        with changed:
            begun.append(file)
            changed.notify_all()
        assert allowed[file].wait(60)
        if file == 9:
            raise BadDataError("9.tar", "damaged")
        return 10 * file

    def wait_for(*files: int) -> None:
        with changed:
            assert changed.wait_for(lambda: sorted(begun) == sorted(files), timeout=60), begun

    def results(*files: int) -> list[int]:
        for file in files:
            allowed[file].set()
        return scans.results(files)

    scans = FileScans(scan, [5] * 10, ahead_bytes=12)
    scans.expect([3, 1, 4, 2, 9], first=1)
    wait_for(3)  # alone, so that it has the whole link
    assert results(3) == [30]
    wait_for(3, 1, 4)  # ten of twelve bytes ahead
    assert results(4, 1) == [40, 10]
    wait_for(3, 1, 4, 2, 9)
    with pytest.raises(BadDataError):
        results(2, 9)
