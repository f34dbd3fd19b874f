"""Tables of pulled rows give the vectors and the gradients of whole tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from wanma.models.recommender.embedding_tables import OFFSETS, EmbeddingTables
from wanma.training.step.pulled_tables import WorkerTables

NAME = "tables.tables.of_tags.weight"


@pytest.mark.parametrize(
    "starts", [[0, 1, 2, 3, 4], [0, 0, 2, 5, 5], [0, 3]], ids=["single ids", "bags", "two bags"]
)
def test_pulled_rows_are_summed_as_those_of_whole_tables(starts: list[int]) -> None:
    ids = torch.tensor([7, 2, 7, 9, 0])
    features = {"tags": ids, "tags" + OFFSETS: torch.tensor(starts)}
    model = nn.Module()
    model.tables = whole = EmbeddingTables({"tags": 11}, 3)
    (weight,) = whole.parameters()
    expected = whole(features)()[0]
    given = torch.randn(expected.shape)
    expected.backward(given)
    worker = WorkerTables(model)
    used = worker.ids([cast(Any, SimpleNamespace(keywords=features))])
    assert used[NAME].tolist() == [0, 2, 7, 9]
    worker.fill(used, {NAME: weight.detach()[used[NAME]]}, torch.device("cpu"))
    sums = cast(Any, model.tables)(features)()[0]
    torch.testing.assert_close(sums, expected)
    sums.backward(given)
    assert weight.grad is not None
    torch.testing.assert_close(worker.gradients()[NAME], weight.grad[used[NAME]])
