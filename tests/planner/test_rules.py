"""What cannot be combined is refused before anything starts, with the keys and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.job.cluster import Cluster, Node
from wanma.job.errors import JobError
from wanma.job.plan import Plan
from wanma.job.sections import Job
from wanma.models.presets import DecoderDimensions
from wanma.planner.rules import check_axes, check_dimensions

LAPTOP = Cluster((Node("laptop", 8, 16 << 30, ()),))


def job(model: dict[str, Any] | None = None, **sections: Any) -> Job:
    return Job.model_validate({"model": model or {"preset": "gpt-1m"}, **sections})


def text(length: int) -> dict[str, Any]:
    return {"text": ["stdlib"], "sequence_length": length}


# ------------------------------------------------------------------ context parallel


@pytest.mark.parametrize(
    ("plan", "refused", "accepted"),
    [
        (Plan(cp=2), 6, 8),
        (Plan(cp=4), 20, 24),
        (Plan(cp=4, context="all_to_all"), 22, 20),
        (Plan(cp=2, tp=2, sequence=True, context="all_to_all"), 6, 8),
        (Plan(cp=2, tp=3, sequence=True), 18, 24),
    ],
    ids=str,
)
def test_context_ranks_want_a_sequence_that_they_can_cut_evenly(
    plan: Plan, refused: int, accepted: int
) -> None:
    check_axes(job(data=text(accepted)), plan, LAPTOP)
    with pytest.raises(
        JobError, match=rf"data.sequence_length = {refused} .*parallel.cp = {plan.cp}"
    ) as error:
        check_axes(job(data=text(refused)), plan, LAPTOP)
    assert f"a multiple of {plan.sequence_unit}" in error.value.hint


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ({"preset": "resnet-18"}, {}),
        ({"family": "convnet"}, {"images": "digits.npz"}),
        ({"preset": "gpt-1m"}, {"images": "digits.npz"}),
    ],
)
def test_images_have_no_sequence_to_share(model: dict[str, Any], data: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"parallel.cp = 2 cuts sequences, and images have none"):
        check_axes(job(model, data=data), Plan(cp=2), LAPTOP)


def test_a_factorys_model_declares_no_attention_to_share() -> None:
    with pytest.raises(JobError, match=r"parallel.cp = 2: mine:model does not declare its attention"):
        check_axes(job({"factory": "mine:model"}), Plan(cp=2), LAPTOP)


def test_all_to_all_shares_heads_that_divide_and_a_ring_any() -> None:
    decoder = DecoderDimensions(2, 48, 6, 2, 64, 320)
    asked = job()
    check_dimensions(asked, Plan(cp=4), decoder)
    check_dimensions(asked, Plan(cp=3, tp=2, context="all_to_all"), decoder)
    with pytest.raises(JobError, match=r"parallel.cp = 4 .*'all_to_all' cannot share model.heads = 6"):
        check_dimensions(asked, Plan(cp=4, context="all_to_all"), decoder)
    with pytest.raises(JobError, match=r"model.heads = 6 after parallel.tp = 2") as error:
        check_dimensions(asked, Plan(cp=2, tp=2, context="all_to_all"), decoder)
    assert "parallel.context = 'ring'" in error.value.hint
