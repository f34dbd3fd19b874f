"""Batches in one buffer: every tensor comes back as it was, and parts of a batch are its beginning."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from wanma.data.batch import BadSample, Batch
from wanma.data.handover.batch_layout import UnsupportedTensorError, layout_of, read_batch, write_tensors
from wanma.data.handover.shared_batches import BatchFile


def made(**values: Any) -> Batch:
    given = {
        "inputs": (torch.arange(12.0).reshape(3, 4), torch.tensor([True, False, True])),
        "targets": torch.tensor([4, -100, 2]),
        "samples": torch.tensor([7, -1, 9]),
        "real": torch.tensor([True, False, True]),
        "keywords": {"documents": torch.arange(6, dtype=torch.int16).reshape(3, 2)},
        "target_key": "labels",
        "class_range": (2, 4),
        "bad_samples": (BadSample(8, "a.tar: row 8", "the image is empty", is_substituted=False),),
    }
    return Batch(**{**given, **values})


def moved(batch: Batch, content: Any = "complete") -> Batch:
    layout, tensors = layout_of(batch)
    size = layout["ends"][content]
    buffer = bytearray(layout["ends"]["complete"])
    write_tensors(layout, tensors, buffer)
    return read_batch(json.loads(json.dumps(layout)), buffer[:size], size)


def assert_same(one: Tensor, other: Tensor) -> None:
    assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
    assert torch.equal(one, other)


def test_a_batch_comes_back_with_all_it_has() -> None:
    batch = made()
    found = moved(batch)
    for one, other in zip(batch.inputs, found.inputs, strict=True):
        assert_same(one, other)
    for name in ("targets", "samples", "real"):
        assert_same(getattr(batch, name), getattr(found, name))
    assert_same(batch.keywords["documents"], found.keywords["documents"])
    assert (found.target_key, found.class_range) == ("labels", (2, 4))
    assert found.bad_samples == batch.bad_samples
    assert found.named_targets is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3).T,
        torch.randn(3, 2, dtype=torch.bfloat16),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(3, 0),
        torch.zeros(3, dtype=torch.uint8),
    ],
    ids=["channels last", "transposed", "bf16", "complex", "empty", "bytes"],
)
def test_types_and_strides_are_kept(tensor: Tensor) -> None:
    assert_same(tensor, moved(made(inputs=(tensor,))).inputs[0])


def test_gaps_and_repeated_elements_are_not_kept() -> None:
    for tensor in (torch.randn(3, 8)[:, ::2], torch.randn(3, 1).expand(3, 5)):
        found = moved(made(inputs=(tensor,))).inputs[0]
        assert torch.equal(found, tensor)
        assert found.is_contiguous()


def test_the_first_of_named_targets_is_the_target_itself() -> None:
    targets = {"box": torch.randn(3, 4), "class": torch.tensor([1, 2, 3])}
    found = moved(made(targets=targets["box"], named_targets=targets, class_range=None))
    assert found.targets is found.named_targets["box"]
    assert_same(found.named_targets["class"], targets["class"])


@pytest.mark.parametrize("content", ["targets", "rows"])
def test_a_part_has_the_shapes_of_what_it_leaves_out(content: str) -> None:
    batch = made()
    found = moved(batch, content)
    assert [one.shape for one in found.inputs] == [one.shape for one in batch.inputs]
    assert not any(bool(one.any()) for one in found.inputs)
    assert torch.equal(found.samples, batch.samples)
    assert torch.equal(found.keywords["documents"], batch.keywords["documents"])
    assert found.targets.shape == batch.targets.shape
    assert torch.equal(found.targets, batch.targets) == (content == "targets")


def test_a_batch_in_a_file_is_changed_by_nobody_else() -> None:
    file = BatchFile(made())
    one, other = file.map(), file.map()
    one.inputs[0].fill_(0.5)
    assert_same(other.inputs[0], made().inputs[0])
    assert_same(file.map().inputs[0], made().inputs[0])


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.nn.Parameter(torch.zeros(3)), torch.zeros(3, device="meta")],
    ids=["sparse", "parameter", "on another device"],
)
def test_a_tensor_that_is_not_plain_memory_is_refused(tensor: Tensor) -> None:
    with pytest.raises(UnsupportedTensorError, match="a sample has a"):
        layout_of(made(inputs=(tensor,)))
