"""Embedding tables that ranks share train as those of one process, however they are placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.compare import same_numbers
from support.ranks import Outcome, run_here, run_job
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.recommender.embedding_tables import EmbeddingTables
from wanma.parallel.embedding import native_rows, table_layout
from wanma.parallel.embedding.sharded_embedding import shard_embeddings
from wanma.parallel.mesh.parallel_mesh import open_mesh

SHARDINGS: dict[str, dict[str, Any]] = {
    "row_wise": {"embedding": "row_wise"},
    "table_wise": {"embedding": "table_wise"},
    "replicated": {"embedding": "replicated"},
    "auto": {"embedding": "auto"},
    "mixed": {"embedding": "row_wise", "embedding_tables": (("t*", "table_wise"), ("user", "replicated"))},
}
LAYOUTS: dict[str, Plan] = {
    "1": Plan(),
    "2": Plan(dp_replicate=2),
    "3": Plan(dp_replicate=3),
    "4": Plan(dp_replicate=4),
    "ZeRO 1": Plan(dp_shard=2, shard="optimizer"),
    "ZeRO 3": Plan(dp_shard=3, shard="parameters"),
    "HSDP": Plan(dp_replicate=2, dp_shard=2, shard="parameters"),
}
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
PAIRS = ("two_tower", "matrix_factorization")
DEFAULT_CASES = {
    ("row_wise", "2", "adagrad"),
    ("table_wise", "3", "adam"),
    ("replicated", "2", "rowwise_adagrad"),
    ("mixed", "ZeRO 3", "adam"),
}


def job(folder: Path, table_optimizer: str | None, kind: str = "dlrm", **train: Any) -> dict[str, Any]:
    """A model with bags that are empty or repeat ids, and tables whose rows no world size divides."""
    generator = np.random.default_rng(0)
    rows = ["user,item,rating,tags,words,age"]
    for n in range(60):
        tags = generator.integers(0, 7, generator.integers(0, 5))
        words = generator.zipf(1.3, generator.integers(0, 14)) % 11
        bags = ("|".join(map(str, bag)) for bag in (tags, words))
        rows.append(",".join(map(str, (n % 13, n % 3, n % 2, *bags, n / 60))))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.csv").write_text("\n".join(rows) + "\n")
    return {
        "model": {
            "family": "recommender",
            "kind": kind,
            "recommender": {"embedding": 6, "bottom": [5, 6], "top": [9]},
        },
        "data": {
            "path": str(folder / "log.csv"),
            "columns": {"sparse": ["tags", "words"], "dense": ["age"]},
            "interactions": {"target": "click", "positive_from": 1},
            "cache": str(folder / "cache"),
        },
        "train": {
            "precision": "fp64",
            "steps": 4,
            "global_batch": 9,
            "learning_rate": 0.05,
            "schedule": "constant",
            "gradient_clip": 0.05,
            "validation_samples": 12,
            "embedding_optimizer": table_optimizer,
            **train,
        },
        "checkpoint": {"every_steps": 2},
        "observe": {"console": "quiet"},
    }


def placed(layout: str, sharding: str, micro_batch: int = 2) -> Plan:
    """Some ranks have no samples in their last micro-batch."""
    return LAYOUTS[layout].with_changes(micro_batch=micro_batch, precision="fp64", **SHARDINGS[sharding])


def reference(folder: Path, optimizer: str) -> Outcome:
    return run_here(folder, job(folder, optimizer), placed("1", "row_wise", micro_batch=9))


@pytest.mark.parametrize(
    ("sharding", "layout", "optimizer"),
    [
        case if case in DEFAULT_CASES else pytest.param(*case, marks=pytest.mark.full)
        for case in ((s, layout, o) for s in SHARDINGS for layout in LAYOUTS for o in OPTIMIZERS)
    ],
)
def test_a_placement_has_the_numbers_of_one_process(
    sharding: str, layout: str, optimizer: str, tmp_path: Path
) -> None:
    one = reference(tmp_path / "one", optimizer)
    other = run_job(tmp_path / "other", job(tmp_path / "other", optimizer), placed(layout, sharding))
    assert max(one.norms) > 0.05  # the gradients are clipped
    same_numbers(one, other, 1e-9)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["2", "3", "4"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_another_model_has_the_numbers_of_one_process(sharding: str, layout: str, tmp_path: Path) -> None:
    text = job(tmp_path, "adagrad", "dcnv2")
    one = run_here(tmp_path / "one", text, placed("1", "row_wise", micro_batch=9))
    same_numbers(one, run_job(tmp_path / "other", text, placed(layout, sharding)), 1e-9)


def test_sgd_has_the_numbers_of_dense_tables(tmp_path: Path) -> None:
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0}
    dense = run_here(tmp_path, job(tmp_path, None, **plain), Plan(micro_batch=9, precision="fp64"))
    sparse = run_here(
        tmp_path / "sparse", job(tmp_path, "sgd", **plain), placed("1", "table_wise", micro_batch=4)
    )
    same_numbers(dense, sparse, 1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("2", "row_wise"), ("3", "table_wise")),
        pytest.param(("4", "table_wise"), ("HSDP", "mixed"), marks=pytest.mark.full),
        pytest.param(("3", "replicated"), ("1", "auto"), marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_under_another_placement(
    before: tuple[str, str], after: tuple[str, str], tmp_path: Path
) -> None:
    one = reference(tmp_path / "one", "adam")
    folder = tmp_path / "two"
    run_job(folder, job(folder, "adam", steps=2), placed(*before))
    again = run_job(folder, job(folder, "adam"), placed(*after))
    assert again.losses[-2:] == pytest.approx(one.losses[-2:], rel=1e-9)
    same_numbers(one, again, 1e-9)


INCREMENTAL = {"every_steps": 1, "keep": 9, "full_every": 3}


@pytest.mark.parametrize(
    ("sharding", "layout", "optimizer"),
    [
        case if case in {("mixed", "3", "rowwise_adagrad")} else pytest.param(*case, marks=pytest.mark.full)
        for case in ((s, layout, o) for s in SHARDINGS for layout in ("1", "3", "HSDP") for o in OPTIMIZERS)
    ],
)
def test_an_incremental_checkpoint_is_that_of_a_full_save_bit_for_bit(
    sharding: str, layout: str, optimizer: str, tmp_path: Path
) -> None:
    runs = []
    for name, every in (("full", 1), ("incremental", 3)):
        text = job(tmp_path / name, optimizer)
        text["checkpoint"] = {**INCREMENTAL, "full_every": every}
        runs.append(run_job(tmp_path / name, text, placed(layout, sharding)))
    for step in range(1, 5):
        full, incremental = (run.tensors(step) for run in runs)
        assert full.keys() == incremental.keys()
        assert all(torch.equal(incremental[name], tensor) for name, tensor in full.items())
    files = [sorted(path.glob("base-*")) for path in sorted(runs[1].directory.glob("checkpoints/step-*"))]
    assert [bool(found) for found in files] == [False, True, True, False]


def test_an_incremental_checkpoint_goes_on_under_another_placement(tmp_path: Path) -> None:
    one = reference(tmp_path / "one", "adam")
    folder = tmp_path / "two"
    for steps, layout, sharding in ((2, "2", "row_wise"), (3, "1", "auto"), (4, "3", "mixed")):
        text = {**job(folder, "adam", steps=steps), "checkpoint": INCREMENTAL}
        again = run_job(folder, text, placed(layout, sharding))
    same_numbers(one, again, 1e-9)
    # Each start begins with a full save.
    assert [step for step in range(1, 5) if list(folder.glob(f"checkpoints/step-*{step}/base-*"))] == [2]


@pytest.mark.parametrize(
    ("kind", "sharding", "layout"),
    [
        case if case[1:] == ("row_wise", "2") else pytest.param(*case, marks=pytest.mark.full)
        for case in ((k, s, layout) for k in PAIRS for s in SHARDINGS if s != "mixed" for layout in "1234")
    ],
)
def test_single_ids_of_candidates_are_looked_up_too(
    kind: str, sharding: str, layout: str, tmp_path: Path
) -> None:
    text = job(tmp_path, "adagrad")
    text["model"] = {"family": "recommender", "kind": kind, "recommender": {"embedding": 6}}
    text["data"] |= {"kind": "interactions", "columns": {}}
    text["data"]["interactions"] = {"target": "click", "negatives": 3}
    one = run_here(tmp_path / "one", text, placed("1", "row_wise", micro_batch=9))
    same_numbers(one, run_job(tmp_path / "two", text, placed(layout, sharding)), 1e-9)


def test_vectors_over_gloo_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Ranks of one host use shared memory by default; those of several, Gloo."""
    one = reference(tmp_path / "one", "adam")
    text = {**job(tmp_path / "other", "adam"), "parallel": {"collectives": "gloo"}}
    same_numbers(one, run_job(tmp_path / "other", text, placed("3", "mixed")), 1e-9)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("bad", [-1, 9])
def test_an_id_outside_of_its_table_is_one_error_with_rank_row_and_table(
    bad: int, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(table_layout, "rows_library", lambda *_: None)
    with torch.device("meta"):
        tables = EmbeddingTables({"user": 20, "item": 9}, 4)
    worker, plan = WorkerContext.single_process(tmp_path), Plan(embedding="row_wise", micro_batch=3)
    with open_mesh(worker, plan, hang_timeout_seconds=60) as mesh:
        (embedding,) = shard_embeddings(nn.ModuleDict({"embeddings": tables}), mesh)
        embedding.allocate(torch.device("cpu"))
        ids = {"user": torch.tensor([19, 9, 0]), "item": torch.tensor([8, 3, bad])}
        offsets = {f"{name}.offsets": torch.arange(3) for name in ids}
        with pytest.raises(WanmaError, match=rf"rank 0: id {bad} in row 2 .*'item', which has 9 rows"):
            tables({**ids, **offsets})


def test_compiled_code_in_fp32_has_the_numbers_of_torch_in_fp64(tmp_path: Path) -> None:
    one = reference(tmp_path / "one", "sgd")
    plan = LAYOUTS["2"].with_changes(micro_batch=2, **SHARDINGS["row_wise"])
    text = job(tmp_path / "two", "sgd", precision="fp32")
    assert native_rows.load_rows_library() is not None
    other = run_job(tmp_path / "two", text, plan)
    assert other.losses == pytest.approx(one.losses, rel=1e-6)
