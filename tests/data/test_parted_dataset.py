"""Data in parts: one order over all, whoever has which part, and each row read where it lies."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.labelled_images import write_folder, write_tar
from wanma.data.batch import BadSample, Batch
from wanma.data.datasets.parted_dataset import PartedDataset, join_rows
from wanma.data.opening import open_dataset, part_sections, prepare_job_data
from wanma.data.sampling.permutation import IndexArray
from wanma.data.text.tokenizer import BytesTokenizer
from wanma.job.errors import AllRanksError, JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

TRAIN = TrainSection(steps=10, global_batch=6, seed=5)


def write_text(folder: Path, numbers: range) -> Path:
    folder.mkdir(parents=True)
    for number in numbers:
        (folder / f"{number}.txt").write_text(f"document {number}: " + f"{number * 7919} " * (5 + number % 4))
    return folder


def opened(*entries: Path, **keys: Any) -> PartedDataset:
    values = {"sequence_length": 8, "validation_fraction": 0.2, "placement": "parts", **keys}
    return open_dataset(DataSection(text=[str(entry) for entry in entries], **values), TRAIN)


class Others:
    """The other nodes, whose rows are read here."""

    def __init__(self, *nodes: PartedDataset) -> None:
        self.nodes, self.asked, self.is_closed = nodes, 0, False

    def read_rows(
        self, part: str, is_validation: bool, rows: IndexArray, sample_indices: IndexArray
    ) -> Batch:
        self.asked += len(rows)
        [owner] = [node for node in self.nodes if part in {one.fingerprint for one in node.local_parts}]
        return owner.read_local_rows(part, is_validation, rows, sample_indices)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    first, second = (
        write_text(tmp_path / str(n), numbers) for n, numbers in enumerate((range(20), range(20, 70)))
    )
    return first, second, tmp_path / "cache"


def assert_same(one: Batch, other: Batch) -> None:
    assert torch.equal(one.inputs[0], other.inputs[0])
    assert torch.equal(one.targets, other.targets)
    assert torch.equal(one.samples, other.samples)
    assert one.class_range == other.class_range
    assert one.keywords.keys() == other.keywords.keys()
    for name, tensor in one.keywords.items():
        assert torch.equal(tensor, other.keywords[name])


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
@pytest.mark.parametrize("masks", [False, True])
def test_two_nodes_read_what_one_with_both_parts_reads(
    folders: tuple[Path, Path, Path], shuffle: str, masks: bool
) -> None:
    first, second, cache = folders
    keys = {"cache": str(cache), "shuffle": shuffle, "block_samples": 4, "document_masks": masks}
    one = opened(second, first, **keys)  # the order of the entries means nothing
    node_0, node_1 = opened(first, **keys), opened(second, **keys)
    parts = [*node_0.parts, *node_1.parts]
    for node, other in ((node_0, node_1), (node_1, node_0)):
        others = Others(other)
        node.join(parts, others, is_spread=True)
        assert (node.fingerprint, node.order_identity) == (one.fingerprint, one.order_identity)
        assert node.train_samples == sum(part.train_samples for part in parts)
        for start in (0, 7, node.train_samples - 3, 5 * node.train_samples):
            assert_same(node.batch(range(start, start + 6)), one.batch(range(start, start + 6)))
        whole = range(node.validation_samples)
        assert_same(node.validation_batch(whole), one.validation_batch(whole))
        assert others.asked > 0
        node.close()
        assert others.is_closed


@pytest.mark.parametrize("shares", [(), (5, 1)], ids=["equal", "uneven"])
def test_an_interleaved_order_has_its_samples_where_they_lie(
    folders: tuple[Path, Path, Path], shares: tuple[int, ...]
) -> None:
    first, second, cache = folders
    keys = {"cache": str(cache), "part_order": "interleaved"}
    one, node_0, node_1 = opened(first, second, **keys), opened(first, **keys), opened(second, **keys)
    nodes, parts = (node_0, node_1), [*node_0.parts, *node_1.parts]
    plan = Plan(dp_replicate=2, micro_batch=3, batch_shares=shares)
    for node, other in (nodes, nodes[::-1]):
        node.join(parts, Others(other), is_spread=True)
        node.data_rank_parts = tuple(frozenset({own.local_parts[0].fingerprint}) for own in nodes)
        assert node.order_identity == one.order_identity
        assert node.step_samples(12, plan, 6).tolist() == list(range(12, 18)), "unless nothing couples rows"
        node.keeps_row_order = False
    sizes = {part.fingerprint: part.train_samples for part in parts}
    samples = 6 * 20
    taken = Counter(one.sample_name(n).split(" of ")[1] for n in range(samples))
    for part in one.parts:
        assert taken[f"{part.entry} on {part.host}"] == pytest.approx(
            samples * sizes[part.fingerprint] / sum(sizes.values()), abs=1
        )
    for step in range(20):
        assigned = node_0.step_samples(6 * step, plan, 6)
        assert assigned.tolist() == node_1.step_samples(6 * step, plan, 6).tolist()
        assert sorted(assigned.tolist()) == list(range(6 * step, 6 * step + 6))
        for data_rank, node in enumerate(nodes):
            rows = plan.batch_rows(6, data_rank)
            chosen = assigned[rows.start : rows.stop]
            assert chosen.tolist() == sorted(chosen)
            assert_same(node.batch(chosen), one.batch(chosen))
    asked = sum(node._remote.asked for node in nodes)  # type: ignore[union-attr]
    assert node_0.forecast_remote_rows(plan, 6) == node_1.forecast_remote_rows(plan, 6) > 0
    global_order = opened(first, second, cache=str(cache))
    assert global_order.order_identity != one.order_identity
    if not shares:  # 6 samples in the ratio of the parts, 2 to 5: the smaller node is lent some
        assert 0 < asked < samples / 2


def test_every_row_of_each_part_is_read_once_an_epoch(folders: tuple[Path, Path, Path]) -> None:
    first, second, cache = folders
    data = opened(first, second, cache=str(cache))
    seen = [data.sample_name(n) for n in range(data.train_samples)]
    assert len(set(seen)) == data.train_samples
    assert {name.split(" of ")[1].split(" on ")[0] for name in seen} == {str(first), str(second)}
    described = data.describe()
    assert sum(part["train_samples"] for part in described["parts"]) == described["train_samples"]


def test_one_part_on_two_nodes_counts_once(folders: tuple[Path, Path, Path]) -> None:
    first, _, cache = folders
    one, copy = opened(first, cache=str(cache)), opened(first, cache=str(cache))
    samples = one.train_samples
    one.join([*one.parts, *copy.parts], Others(), is_spread=False)
    assert one.train_samples == samples
    assert not one.is_costly_to_read


@pytest.mark.parametrize("write", [write_folder, write_tar])
def test_stored_images_in_parts_are_those_of_one_node(write: Any, tmp_path: Path) -> None:
    keys = {
        "placement": "parts",
        "validation_fraction": 0.2,
        "cache": str(tmp_path / "cache"),
        "image_transform": {"size": 8, "augment": ["random_resized_crop", "horizontal_flip"]},
    }
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, count in zip(folders, (24, 30), strict=True):
        folder.mkdir()
        write(folder, count)
    one, node_0, node_1 = (
        open_dataset(DataSection(images=[str(folder) for folder in own], **keys), TRAIN)
        for own in (folders, folders[:1], folders[1:])
    )
    node_0.join([*node_0.parts, *node_1.parts], Others(node_1), is_spread=True)
    assert node_0.classes == one.classes == 3
    assert_same(node_0.batch(range(20, 40)), one.batch(range(20, 40)))


def test_entries_that_a_node_does_not_have_are_those_of_others(folders: tuple[Path, Path, Path]) -> None:
    first, second, cache = folders
    section = DataSection(text=[str(first), "nowhere", str(second)], placement="parts", cache=str(cache))
    assert [entry for entry, _ in part_sections(section)] == [str(first), str(second)]
    prepare_job_data(section)
    assert len(list(cache.rglob("header.json"))) == 2
    nothing = section.model_copy(update={"text": ["nowhere"]})
    with pytest.raises(JobError, match=r"data\.text"):
        part_sections(nothing)


def test_parts_of_different_tokenizers_are_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    *corpora, cache = folders
    content = json.loads(BytesTokenizer().to_huggingface_json())
    nodes = []
    for number, (corpus, ids) in enumerate(zip(corpora, ((97, 98), (98, 97)), strict=True)):
        content["model"]["vocab"].update(zip("ab", ids, strict=True))
        path = tmp_path / f"tokenizer-{number}.json"
        path.write_text(json.dumps(content))
        nodes.append(opened(corpus, cache=str(cache), tokenizer=str(path)))
    assert nodes[0].vocabulary_size == nodes[1].vocabulary_size
    with pytest.raises(AllRanksError, match="are of another form than those of"):
        nodes[0].join([*nodes[0].parts, *nodes[1].parts], Others(nodes[1]), is_spread=True)


def test_arrays_in_memory_are_refused(tmp_path: Path) -> None:
    images = np.zeros((8, 3, 4, 4), np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(8) % 2)
    section = DataSection(images=[str(tmp_path / "a.npz")], placement="parts")
    with pytest.raises(JobError, match="normalized by their own mean"):
        prepare_job_data(section)


def test_joined_rows_have_their_places() -> None:
    def batch(samples: list[int], *bad: BadSample, classes: tuple[int, int] | None) -> Batch:
        numbers = torch.tensor(samples)
        return Batch(
            (numbers.float().unsqueeze(1),),
            2 * numbers,
            numbers,
            numbers != 3,
            {"k": numbers},
            bad_samples=bad,
            class_range=classes,
        )

    bad = [BadSample(number, f"row {number}", "cut", is_substituted=False) for number in (3, 1)]
    joined = join_rows(
        [batch([0, 3], bad[0], classes=(0, 6)), batch([1, 2], bad[1], classes=None)],
        [np.array([0, 3]), np.array([1, 2])],
    )
    assert joined.samples.tolist() == joined.keywords["k"].tolist() == [0, 1, 2, 3]
    assert joined.inputs[0].flatten().tolist() == [0, 1, 2, 3]
    assert joined.targets.tolist() == [0, 2, 4, 6]
    assert joined.real.tolist() == [True, True, True, False]
    assert joined.class_range == (0, 6)
    assert [one.sample for one in joined.bad_samples] == [1, 3]
