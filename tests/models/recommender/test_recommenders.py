"""Recommenders as modules: formulas, ranks, bags, initial values, sizes of the presets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from support.text import text_spec
from wanma.job.errors import JobError
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import InteractionSizes
from wanma.models.model_spec import build_model, resolve_model_spec
from wanma.models.recommender.base import Recommender
from wanma.models.recommender.click_models import Dlrm, interact
from wanma.models.recommender.config import PAIR_KINDS
from wanma.models.recommender.pair_models import PairModel
from wanma.models.workload.model_workload import build_section_workload

KINDS = ("matrix_factorization", "two_tower", "dlrm", "dcnv2")


def sizes(**fields: Any) -> InteractionSizes:
    return InteractionSizes("user", "item", **{"tables": {"user": 6, "item": 9}, **fields})


def build(kind: str, known: InteractionSizes | None = None, **keys: Any) -> Recommender:
    section = ModelSection(family="recommender", kind=kind, recommender={"embedding": 8, **keys})
    spec = resolve_model_spec(
        section,
        vocabulary_size=None,
        sequence_length=None,
        image_shape=None,
        classes=None,
        interaction_sizes=known or sizes(),
    )
    model = build_model(spec, seed=1)
    assert isinstance(model, Recommender)
    return model


USERS, ITEMS = torch.tensor([0, 5, 5]), torch.tensor([[1, 2], [8, 1], [3, 3]])


def test_the_score_of_a_factorization_is_a_product_and_biases() -> None:
    model = build("matrix_factorization", sizes(mean_target=3.5))
    state = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    assert float(model.state_dict()["bias"]) == 3.5
    model.load_state_dict(state)
    u, v = state["embeddings.tables.of_user.weight"][USERS], state["embeddings.tables.of_item.weight"][ITEMS]
    biases = (
        state["biases.tables.of_user.weight"][USERS] + state["biases.tables.of_item.weight"][ITEMS][..., 0]
    )
    expected = torch.einsum("rd,rcd->rc", u, v) + biases + state["bias"]
    torch.testing.assert_close(model(user=USERS, item=ITEMS)["scores"], expected)


def test_rows_that_ids_share_are_no_items_of_the_catalogue() -> None:
    model = build("matrix_factorization", sizes(shared_rows={"item": 3}))
    assert isinstance(model, PairModel)
    scores = model.scores_of_all_items(torch.tensor([4]))[0]
    seen = torch.tensor([[1, 7, -1]])  # the first is shared too
    for own in (1, 5):
        others = [row for row in (3, 4, 5, 6, 8) if row != own]
        rank = model(user=torch.tensor([4]), item=torch.tensor([[own]]), seen=seen)["rank"]
        assert int(rank) == 1 + sum(bool(scores[row] >= scores[own]) for row in others)


def test_the_score_of_two_towers_is_a_cosine_over_the_temperature() -> None:
    model = build("two_tower", towers=[12, 4], temperature=0.5)
    assert isinstance(model, PairModel)
    output = model(user=USERS, item=ITEMS)
    assert output["scores"].abs().max() <= 2 + 1e-5
    torch.testing.assert_close(output["items"].norm(dim=2), torch.ones(3, 2))
    torch.testing.assert_close(
        model.scores_of_all_items(USERS).gather(1, ITEMS), output["scores"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", PAIR_KINDS)
def test_the_rank_counts_items_that_are_not_seen(kind: str) -> None:
    model = build(kind)
    assert isinstance(model, PairModel)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    seen = torch.tensor([[2, 3, -1], [0, -1, -1], [3, 4, 5]])
    ranks = model(user=USERS, item=ITEMS, seen=seen)["rank"].tolist()
    for row, scores in enumerate(model.scores_of_all_items(USERS).tolist()):
        own, hidden = int(ITEMS[row, 0]), set(seen[row].tolist())
        others = [score for item, score in enumerate(scores) if item != own and item not in hidden]
        assert ranks[row] == 1 + sum(score >= scores[own] for score in others)


def test_equal_scores_and_no_numbers_rank_last() -> None:
    model = build("matrix_factorization")
    for value in (0.0, float("nan")):
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
        seen = torch.full((3, 1), -1)
        assert model(user=USERS, item=ITEMS, seen=seen)["rank"].tolist() == [9, 9, 9]


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
def test_bags_are_sums_empty_ones_zeros_and_repeated_ids_count_twice(kind: str) -> None:
    known = sizes(tables={"user": 6, "item": 9, "type": 7}, dense=2)
    model = build(kind, known, bottom=[5, 8])
    dense, offsets = torch.randn(3, 2), torch.tensor([0, 2, 2])
    bags = {"type": torch.tensor([4, 4, 6]), "type.offsets": offsets}
    table = model.embeddings.tables["of_type"].weight  # type: ignore[union-attr,index]
    vectors = model.embeddings(
        {"user": USERS, "item": ITEMS[:, 0], **bags}
        | {  # type: ignore[operator]
            f"{name}.offsets": torch.arange(3) for name in ("user", "item")
        }
    )()
    torch.testing.assert_close(vectors[2], torch.stack([2 * table[4], 0 * table[0], table[6]]))
    output = model(dense, user=USERS, item=ITEMS, **bags)["scores"]
    assert output.shape == (3, 1)
    alone = model(
        dense[1:2],
        user=USERS[1:2],
        item=ITEMS[1:2],
        **{"type": bags["type"][:0], "type.offsets": offsets[:1]},
    )
    torch.testing.assert_close(alone["scores"], output[1:2])
    output.sum().backward()
    used = table.grad.abs().sum(1) > 0
    assert set(used.nonzero().flatten().tolist()) <= {4, 6}


def test_dlrm_interacts_all_pairs() -> None:
    first, second, third = torch.randn(3, 2, 8)
    pairs = [(first * second).sum(1), (first * third).sum(1), (second * third).sum(1)]
    products = interact([first, second, third], False)
    torch.testing.assert_close(products, torch.stack(pairs, 1))
    assert torch.equal(interact([first, second, third], True), torch.cat([first, products], 1))


@pytest.mark.parametrize("excess", [1, 3])
def test_columns_of_zeros_after_the_products_change_no_score(excess: int) -> None:
    model = build("dlrm", sizes(dense=2), bottom=[8], top=[3])
    assert isinstance(model, Dlrm)
    vectors = list(torch.randn(3, 5, 8))
    expected = model.score(vectors)
    model.interaction = lambda vectors, keeps_first: F.pad(interact(vectors, keeps_first), (0, excess))
    torch.testing.assert_close(model.score(vectors), expected)


def test_a_cross_layer_is_start_times_low_rank_plus_x() -> None:
    model = build("dcnv2", cross_layers=1, cross_rank=3)
    layer = model.cross[0]  # type: ignore[index]
    start, x = torch.randn(2, 16), torch.randn(2, 16)
    expected = start * F.linear(x, layer.up.weight @ layer.down.weight, layer.up.bias) + x
    torch.testing.assert_close(layer(start, x), expected)


@pytest.mark.parametrize(("preset", "parameters"), [("dcnv2-mlperf", 26.1e9), ("youtube-50b", 50.0e9)])
def test_a_preset_has_its_published_size_without_memory_for_it(preset: str, parameters: float) -> None:
    workload = build_section_workload(
        ModelSection(preset=preset), vocabulary_size=None, sequence_length=1, image_shape=None, classes=None
    )
    assert workload is not None
    assert workload.parameters == pytest.approx(parameters, rel=5e-3)
    assert workload.flops_per_sample > 1e6


@pytest.mark.parametrize(
    ("kind", "keys", "known", "key"),
    [
        ("dlrm", {"tables": {"item": 5}}, {}, "model.recommender.tables.item"),
        ("dlrm", {}, {"dense": 3}, "model.recommender.bottom"),
        ("dlrm", {"towers": [4]}, {}, "model.recommender.towers"),
        ("dcnv2", {"objective": "in_batch_softmax"}, {"target": "click"}, "log_loss"),
        ("two_tower", {"objective": "sampled_softmax"}, {"target": "click"}, "data.interactions.negatives"),
        ("two_tower", {"objective": "log_loss"}, {}, "squared_error"),
        ("two_tower", {}, {"tables": {"user": 2, "item": 2, "tags": 4}}, "data.columns.sparse"),
        ("dlrm", {}, {"target": "click", "negatives": 4}, "0"),
        ("dlrm", {"tables": {"other": 5}}, {}, "data.columns.user"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_to_change(
    kind: str, keys: dict[str, Any], known: dict[str, Any], key: str
) -> None:
    with pytest.raises(JobError) as raised:
        build(kind, sizes(**known), **keys)
    assert key in raised.value.hint


def test_an_id_outside_a_table_is_named_with_value_size_and_row() -> None:
    with pytest.raises(JobError) as raised:
        build("dlrm", sizes(largest_rows={"item": "log.csv: row 41"}), tables={"item": 5})
    assert all(part in raised.value.message for part in ("item", "id 8", "5 rows", "log.csv: row 41"))


@pytest.mark.parametrize("keys", [{"kind": "dlrm"}, {"recommender": {"embedding": 4}}])
def test_other_models_refuse_the_keys_of_recommenders(keys: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="recommender"):
        text_spec(ModelSection(preset="gpt-1m", **keys), 300, 8)
