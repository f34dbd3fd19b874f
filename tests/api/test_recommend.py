"""Top items of a user, from a run's checkpoint; and the examples on MovieLens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wanma
from support.ranks import Outcome, run_here
from wanma.data.data_kinds import with_data_kinds
from wanma.data.interactions.dataset import InteractionDataset
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.data import DataSection
from wanma.job.sections.job import Job
from wanma.models.recommender.embedding_tables import EmbeddingTables
from wanma.models.recommender.pair_models import PairModel

EXAMPLES = Path(__file__).parents[2] / "examples"
REAL = Path(__file__).parents[3] / "shared" / "data" / "movielens-100k-ratings.tsv"
needs_movielens = pytest.mark.skipif(not REAL.exists(), reason="no ../shared/data here")


def train_here(folder: Path, example: str, log: str, **overrides: Any) -> Outcome:
    """Train an example by one rank in this process."""
    keys = [f"data.path={log}", f"data.cache={folder / 'cache'}", "observe.console=quiet"]
    keys += [f"{key}={value}" for key, value in overrides.items()]
    job = with_data_kinds(load_job(EXAMPLES / example, keys))
    outcome = run_here(
        folder, job.model_dump(), Plan(micro_batch=job.train.global_batch, precision=job.train.precision)
    )
    RunDirectory(folder).job.write_text(job_to_toml(job))
    return outcome


SHORT = {"train.steps": 4, "train.global_batch": 32}


def test_tables_are_loaded_in_the_order_in_which_the_model_was_trained(tmp_path: Path) -> None:
    train_here(tmp_path, "dlrm-sharded.toml", "synthetic:30x40x600", **SHORT)
    embeddings = wanma.load(tmp_path).model.embeddings
    assert isinstance(embeddings, EmbeddingTables)
    assert list(embeddings.rows) == ["user", "item"]


@pytest.mark.parametrize("kind", ["dcnv2", "dlrm"])
def test_a_click_model_trains_on_a_log_in_criteo_s_format(kind: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    lines = []
    for row in range(200):
        numbers = ["" if draw.random() < 0.2 else str(draw.integers(-2, 900)) for _ in range(13)]
        ids = ["" if draw.random() < 0.1 else f"{draw.integers(1 << 32):08x}" for _ in range(26)]
        lines.append("\t".join([str(row % 4 // 3), *numbers, *ids]))
    (tmp_path / "train.txt").write_text("\n".join(lines) + "\n")
    keys = {"model.kind": kind, "data.interactions.hash_rows": '{"*" = 30}'}
    run = train_here(tmp_path, "criteo.toml", str(tmp_path / "train.txt"), **SHORT, **keys)
    assert run.losses[-1] < run.losses[0]
    assert 0 <= run.validations[-1]["metrics"]["auc"] <= 1
    tables = [tensor for name, tensor in run.tensors().items() if ".of_" in name and "model." in name]
    assert [tensor.shape for tensor in tables] == [(30, 16)] * 26


@pytest.mark.parametrize("example", ["movielens.toml", "movielens-top-items.toml"])
def test_the_first_items_of_a_user_are_those_of_the_highest_scores(example: str, tmp_path: Path) -> None:
    train_here(tmp_path, example, "synthetic:30x40x600", **SHORT)
    loaded = wanma.load(tmp_path)
    assert isinstance(loaded.model, PairModel)
    scores = loaded.model.scores_of_all_items(torch.tensor([7]))[0]
    best = loaded.recommend(7, 5)
    assert [item for item, _ in best] == scores.argsort(descending=True)[:5].tolist()
    assert [score for _, score in best] == pytest.approx(scores.sort(descending=True).values[:5].tolist())
    left_out = [item for item, _ in best[:2]]
    assert [item for item, _ in loaded.recommend(7, 3, exclude=left_out)] == [item for item, _ in best[2:]]
    assert len(loaded.recommend(7, 1000, exclude=[0, 0, 1])) == len(scores) - 2
    for user, exclude in ((-1, []), (30, []), (7, [40])):
        with pytest.raises(WanmaError, match="outside its embedding table"):
            loaded.recommend(user, exclude=exclude)


def test_a_user_s_first_items_have_the_ids_of_the_data(tmp_path: Path) -> None:
    rows = [f"{10**17 + n % 20},{(1 << 62) + n * 7 % 30},1,{n}" for n in range(400)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item,rating,time", *rows, f"{10**17},5,1,999"]) + "\n")
    keys = {"data.interactions.admit_rows": '{"*" = 99}', "data.interactions.shared_rows": 6}
    run = train_here(tmp_path, "movielens-top-items.toml", str(tmp_path / "log.csv"), **SHORT, **keys)
    assert 0 <= run.validations[-1]["metrics"]["recall@10"] <= 1
    loaded, user = wanma.load(tmp_path), 10**17 + 7
    assert isinstance(loaded.model, PairModel)
    known = loaded.admitted_ids["item"].table[:, 0]
    assert sorted(known[6:].tolist()) == [(1 << 62) + n for n in range(30)]
    scores = loaded.model.scores_of_all_items(loaded.rows("user", [user]))[0, 6:]
    best = loaded.recommend(user, 5)
    assert [item for item, _ in best] == known[6:][scores.argsort(descending=True)[:5]].tolist()
    left_out = [item for item, _ in best[:2]]
    others = loaded.recommend(10**17 + 7, 99, exclude=[*left_out, 5])  # 5 has no row of its own
    assert len(others) == 28
    assert not {*left_out, 5} & {item for item, _ in others}
    assert len(loaded.recommend(3)) == 10  # a user without a row
    with pytest.raises(WanmaError, match="outside"):
        loaded.recommend(-1)
    with pytest.raises(WanmaError, match="'channel'"):
        loaded.rows("channel", [1])


def test_a_model_that_ranks_no_items_says_so(tmp_path: Path) -> None:
    train_here(tmp_path, "movielens.toml", "synthetic:30x40x600", **SHORT, **{"model.kind": "dlrm"})
    with pytest.raises(WanmaError) as raised:
        wanma.load(tmp_path).recommend(7)
    assert "two_tower" in raised.value.hint


@pytest.mark.full
@needs_movielens
@pytest.mark.parametrize("fold", range(5))
def test_ratings_of_movielens_are_predicted_within_0_94(fold: int, tmp_path: Path) -> None:
    run = train_here(tmp_path, "movielens.toml", str(REAL), **{"data.interactions.fold": fold})
    assert run.validations[-1]["metrics"]["rmse"] <= 0.94


@pytest.mark.full
@needs_movielens
def test_the_held_out_item_is_among_ten_half_as_often_again_as_by_popularity(tmp_path: Path) -> None:
    run = train_here(tmp_path, "movielens-top-items.toml", str(REAL))
    job: Job = load_job(RunDirectory(tmp_path).job)
    assert run.validations[-1]["metrics"]["recall@10"] >= 1.5 * recall_of_popularity(job.data)


def recall_of_popularity(section: DataSection) -> float:
    """Recall of the ten items with the most rows in training that the user has not seen."""
    data = InteractionDataset(section, 0, 1)
    train = data.batch(range(data.train_samples))  # one epoch: every row once
    items = train.keywords["item"][:, 0].numpy()
    counts = np.bincount(items, minlength=data.interaction_sizes.tables["item"]).astype(float)
    held_out = data.validation_batch(range(data.validation_samples))
    hits = 0
    for seen, own in zip(held_out.keywords["seen"].numpy(), held_out.keywords["item"][:, 0], strict=True):
        left = counts.copy()
        left[seen[(seen >= 0) & (seen != int(own))]] = -1
        hits += int((left >= left[own]).sum() <= 10)
    return hits / data.validation_samples
