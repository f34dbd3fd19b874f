"""Context parallel in whole jobs: the numbers of one process, with every other axis and option beside it."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from support.compare import EXACT_TRAIN, one_process, same_numbers, spread_over
from support.own_loop import session_job
from support.ranks import Outcome
from support.text import DECODER, SMALL_DECODER, short_texts, text_job
from support.traced import spread_traced
from wanma.data.batch import IGNORE_INDEX
from wanma.job.plan.plan import Plan


def job(folder: Path, *, data: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """A small decoder on many short texts; 5 samples per step, which no world divides."""
    train = {**EXACT_TRAIN, "global_batch": 5, "validation_samples": 3, "validate_every_steps": 2}
    model = {**DECODER, "kv_heads": 2, **model}
    return text_job(folder, model, text=short_texts(folder), sequence_length=32, data=data, **train)


JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"data": {"document_masks": True}},
    "tied, dropout": {"tie_embeddings": True, "dropout": 0.1},
    "one key/value head, documents, dropout": {
        "kv_heads": 1,
        "dropout": 0.1,
        "data": {"document_masks": True},
    },
}

PLANS: list[tuple[str, Plan]] = [
    ("plain", Plan(cp=2, micro_batch=5)),
    ("plain", Plan(cp=2, cp_method="all_to_all", micro_batch=2)),
    ("documents", Plan(cp=2, micro_batch=2)),
    ("documents", Plan(cp=2, cp_method="all_to_all", micro_batch=5)),
    ("one key/value head, documents, dropout", Plan(cp=4, micro_batch=5)),
    ("one key/value head, documents, dropout", Plan(cp=4, cp_method="all_to_all", micro_batch=2)),
    ("tied, dropout", Plan(cp=2, shard="parameters", micro_batch=2, recompute="full")),
    ("documents", Plan(cp=2, dp_shard=2, shard="parameters", micro_batch=1)),
    ("tied, dropout", Plan(cp=2, dp_shard=2, shard="gradients", cp_method="all_to_all", micro_batch=1)),
    ("tied, dropout", Plan(cp=2, dp_replicate=2, micro_batch=2, recompute="selective")),
    ("documents", Plan(cp=2, dp_replicate=2, shard="optimizer", cp_method="all_to_all", micro_batch=2)),
    ("documents", Plan(cp=2, pp=2, micro_batch=1)),
    ("tied, dropout", Plan(cp=2, pp=2, schedule="gpipe", cp_method="all_to_all", micro_batch=2)),
    ("documents", Plan(cp=2, pp=2, schedule="interleaved_1f1b", virtual_stages=2, micro_batch=3)),
    ("documents", Plan(cp=2, pp=2, schedule="zbv", virtual_stages=2, cp_method="all_to_all", micro_batch=1)),
    ("documents", Plan(cp=2, tp=2, micro_batch=2)),
    ("documents", Plan(cp=2, tp=2, sequence_parallel=True, cp_method="all_to_all", micro_batch=5)),
    ("tied, dropout", Plan(cp=2, tp=2, sequence_parallel=True, micro_batch=2, shard="parameters")),
    ("one key/value head, documents, dropout", Plan(cp=2, tp=2, sequence_parallel=True, micro_batch=2)),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs in one process, made once per job."""

    @cache
    def run(name: str) -> Outcome:
        folder = tmp_path_factory.mktemp("one")
        return one_process(folder / "run", job(folder, **JOBS[name]), 5)

    return run


@pytest.mark.parametrize(("name", "plan"), PLANS, ids=lambda value: str(value).replace(" ", "-"))
@pytest.mark.daily(
    "plain-2-ranks-(cp-2),-fp32,-cpu0",
    "documents-2-ranks-(cp-2),-fp32,-cpu1",
    "one-key/value-head,-documents,-dropout-4-ranks-(cp-4),-fp32,-cpu0",
    "tied,-dropout-2-ranks-(cp-2),-parameters-sharded,-fp32,-cpu",
)
def test_ranks_that_share_sequences_follow_one_process(
    name: str, plan: Plan, tmp_path: Path, reference: Any
) -> None:
    other = spread_over(tmp_path / "run", job(tmp_path, **JOBS[name]), plan)
    same_numbers(reference(name), other)
    assert len(other.validation_losses) == 2
    assert other.validation_losses == pytest.approx(reference(name).validation_losses, rel=1e-10)


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
@pytest.mark.daily("ring")
def test_a_dataset_and_a_loss_of_ones_own_follow_one_process(kind: Any, tmp_path: Path) -> None:
    """Some of its sequences have targets on one rank only, some have none."""
    text = own_data({"sequence": 8})
    objects = {"loss": squared_cross_entropy}
    one = one_process(tmp_path / "one", text, 5, objects=objects)
    plan = Plan(cp=2, dp_replicate=2, cp_method=kind, micro_batch=1)
    same_numbers(one, spread_over(tmp_path / "run", text, plan, objects=objects))


def test_a_dataset_without_sequences_is_refused(tmp_path: Path) -> None:
    text = own_data({"sequence": 6})
    with pytest.raises(AssertionError, match=r"parallel.cp = 2: samples of 6 "):
        spread_over(tmp_path / "run", text, Plan(cp=2, micro_batch=5))


def own_data(arguments: dict[str, Any]) -> dict[str, Any]:
    data = {"factory": "support.own:PartlyLabelled", "arguments": arguments}
    train = {"steps": 3, "global_batch": 5, "validation_samples": 5}
    return session_job(model={**SMALL_DECODER, "vocabulary": 16}, data=data, train=train)


def squared_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE_INDEX
    )
    return losses.view(targets.shape).square()


def test_bf16_stays_near_one_process(tmp_path: Path) -> None:
    """Blocks are added up in fp32, whatever the model computes in."""
    text = job(tmp_path, data={"document_masks": True})
    text["train"]["precision"] = "bf16"
    one = one_process(tmp_path / "one", text, 5)
    for kind in ("ring", "all_to_all"):
        other = spread_over(tmp_path / kind, text, Plan(cp=2, cp_method=kind, micro_batch=5))
        assert other.losses == pytest.approx(one.losses, rel=2e-3)
        assert other.norms == pytest.approx(one.norms, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spread"),
    [("ring", partial(spread_over, seconds=280)), ("all_to_all", spread_traced)],
    ids=["ring", "all_to_all"],
)
@pytest.mark.full
def test_compiled_blocks_follow_one_process(kind: Any, spread: Any, tmp_path: Path) -> None:
    text = job(tmp_path, data={"document_masks": True})
    one = one_process(tmp_path / "one", text, 5)
    plan = Plan(cp=2, cp_method=kind, micro_batch=5, compile=True)
    same_numbers(one, spread(tmp_path / "run", text, plan), 1e-8)


@pytest.mark.slow
@pytest.mark.full
def test_a_process_compiles_anew_for_another_run(tmp_path: Path) -> None:
    """Code of the first run, without dropout, fits the second by all that the compiler looks at.

    Inductor's code alone tells: what is only traced has the right numbers even if nothing is compiled anew.
    """
    text = job(tmp_path, dropout=0.1)
    masked = {**text, "data": {**text["data"], "document_masks": True}}
    masked["model"] = {**text["model"], "dropout": 0.0}
    first = Plan(cp=2, cp_method="all_to_all", micro_batch=5, compile=True)
    spread_over(tmp_path / "first", masked, first, seconds=280)
    one = one_process(tmp_path / "one", text, 5)
    plan = Plan(dp_replicate=2, micro_batch=5, compile=True)
    same_numbers(one, spread_over(tmp_path / "run", text, plan, seconds=280), 1e-8)


def test_a_model_without_declared_attention_is_refused(tmp_path: Path) -> None:
    text = own_data({"sequence": 8})
    text["model"] = {"factory": "support.own:Tagger"}
    with pytest.raises(AssertionError, match=r"cp: support.own:Tagger has no"):
        spread_over(tmp_path / "run", text, Plan(cp=2, micro_batch=5))
