"""Batches of an interaction log: splits, negatives by (seed, sample), and items seen in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wanma.data.interactions.dataset import InteractionDataset, ItemDraws
from wanma.job.sections.data import DataSection


def opened(seed: int = 1, validation_fraction: float = 0.1, **keys: Any) -> InteractionDataset:
    section = {"path": "synthetic:30x40x600", "interactions": keys}
    section["validation_fraction"] = validation_fraction
    return InteractionDataset(DataSection.model_validate(section), seed, 1000)


def pairs(data: InteractionDataset, *, is_validation: bool) -> set[tuple[int, int]]:
    batch = (
        data.validation_batch(range(data.validation_samples))
        if is_validation
        else data.batch(range(data.train_samples))
    )
    return set(zip(batch.keywords["user"].tolist(), batch.keywords["item"][:, 0].tolist(), strict=True))


def test_the_folds_divide_the_rows() -> None:
    folds = [opened(folds=3, fold=fold) for fold in range(3)]
    held_out = [pairs(data, is_validation=True) for data in folds]
    assert len(set.union(*held_out)) == sum(map(len, held_out)) == 600
    assert all(not pairs(data, is_validation=False) & out for data, out in zip(folds, held_out, strict=True))
    assert {len(out) for out in held_out} == {200}


def test_leave_last_holds_out_one_row_of_each_user_the_latest() -> None:
    data = opened(split="leave_last", target="click")
    batch = data.validation_batch(range(data.validation_samples))
    users = batch.keywords["user"].tolist()
    assert len(users) == len(set(users)) == 30
    for user, item in zip(users, batch.keywords["item"][:, 0].tolist(), strict=True):
        rows = data._log.users == user
        assert item == data._log.items[rows][np.argmax(data._log.times[rows])]


def test_seen_items_are_those_of_the_user_in_training() -> None:
    data = opened(split="leave_last", target="click")
    batch = data.validation_batch(range(data.validation_samples))
    train = pairs(data, is_validation=False)
    for user, seen in zip(batch.keywords["user"].tolist(), batch.keywords["seen"].tolist(), strict=True):
        assert sorted(one for one in seen if one >= 0) == sorted(item for who, item in train if who == user)


def test_the_split_by_time_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    times = [5, 3, 9, 1, 7, 2, 8, 4]
    lines = [f"{row},{row % 3},1,{time}" for row, time in enumerate(times)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,rating,time", *lines]) + "\n")
    section = {
        "kind": "interactions",
        "path": str(tmp_path / "log.csv"),
        "cache": str(tmp_path / "cache"),
        "interactions": {"split": "time"},
        "shuffle": "none",
        "validation_fraction": 0.25,
    }
    data = InteractionDataset(DataSection.model_validate(section), 1, 100)
    users = data.batch(range(6)).keywords["user"].tolist()
    assert [times[user] for user in users] == [1, 2, 3, 4, 5, 7]
    held_out = data.validation_batch(range(2)).keywords["user"].tolist()
    assert {times[user] for user in held_out} == {8, 9}


def test_negatives_depend_on_seed_and_sample_alone() -> None:
    data = opened(target="click", negatives=6)
    whole = data.batch(range(20)).keywords["item"]
    parts = torch.cat([data.batch(range(start, start + 5)).keywords["item"] for start in (0, 5, 10, 15)])
    assert torch.equal(whole, parts)
    assert whole.shape == (20, 7)
    assert not torch.equal(
        whole[:, 1:], opened(2, target="click", negatives=6).batch(range(20)).keywords["item"][:, 1:]
    )
    assert len({tuple(row) for row in whole[:, 1:].tolist()}) == 20


@pytest.mark.parametrize("power", [0.0, 0.75, 1.0])
def test_items_are_drawn_with_the_probability_that_is_stated(power: float) -> None:
    items = np.repeat(np.arange(5), [1, 2, 4, 8, 16])
    draws = ItemDraws(items, 5, power, seed=3)
    counts = np.bincount(draws.draw(np.arange(20_000), 10, "negatives").ravel(), minlength=5)
    assert counts / 200_000 == pytest.approx(np.exp(draws.log_probability), rel=0.05)


def test_an_item_that_training_lacks_has_a_finite_probability() -> None:
    draws = ItemDraws(np.array([0, 0, 2]), 4, 1.0, seed=3)
    assert np.isfinite(draws.log_probability).all()
    assert set(draws.draw(np.arange(500), 4, "negatives").ravel().tolist()) == {0, 2}


def test_the_fingerprint_tells_folds_apart_and_not_seeds() -> None:
    first = opened(fold=0)
    assert first.fingerprint == opened(2, fold=0).fingerprint
    assert first.fingerprint != opened(fold=1).fingerprint
