"""Generated modules, losses and data of users' own: trained as a plain PyTorch loop would, or refused.

A part of the cases; all of them with `--exhaustive`, or by `python -m support.generated` (CONTRIBUTING.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from support.generated.case import Case
from support.generated.features import FEATURES
from support.generated.generate import combinations, single_features
from support.generated.judge import Judge, judging
from support.generated.optimizers import BUILT_IN
from support.generated.shrink import shrink
from support.generated.survey import ROWS, Survey, account, documented, survey, words

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "module-features.md"
SEED = 1
"""Seed of the combinations of every day."""

WITH_OTHER_TARGETS = Case(loss="in_batch_negatives", entry="session")
"""A loop of one's own whose loss compares outputs with targets of other samples: no gradient tells."""

REFUSED = {
    "complex_parameter": "is complex",
    "lazy_linear": "has no shape before the first forward",
    "kept_weight": "an old reference to this parameter",
    "kept_first_weight": "an old reference to this parameter",
    "one_storage": "memory",
}
"""Words of the refusal of what no layout can do."""

ALWAYS = (
    "linear",
    "weight_norm",
    "layer_norm",
    "layer_norm_over_two",
    "group_norm",
    "convolution",
    "gru",
    "lstm",
    "gru_cell",
    "attention",
    "encoder_layer",
    "embedding",
    "sequential",
    "module_dict",
    "number",
    "bias_of_three_dims",
    "empty_parameter",
    "transposed_parameter",
    "unused_parameter",
    "unused_module",
    "frozen_module",
    "tied_within",
    "used_twice",
    "two_names",
    "double_parameter",
    "dropout",
    "dropout_twice",
    "buffer",
    "buffer_not_saved",
    "extra_state",
    "forward_hook",
    "backward_hook",
    "detached",
    "checkpoint",
    "task_scales",
    "seldom_used",
    "weights_read",
    "tied_to_first",
    "alias",
    "blocks_twice",
    "frozen_first",
    "given_gradients",
)
"""Features that no layout may refuse."""


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with judging() as judge:
        yield judge


def check(cases: Iterable[Case], judge: Judge) -> Survey:
    """Judge the cases; what is wrong comes as the smallest program that still is."""
    found = survey(cases, judge)
    print(found.counts_table())
    wrong = found.of("wrong")
    over = [
        (case, verdict)
        for case, verdict in found.of("refused")
        if len(case.features) == 1 and case.features[0] in ALWAYS and case.loss in ("squares", "default")
        if case.output == "tensor" and case.optimizer == BUILT_IN
    ]
    assert not over, f"refused without need: {over[0][0]}: {over[0][1].text}"
    assert not wrong, f"seed {SEED}: {len(wrong)} wrong cases\n" + "\n".join(
        account(case, verdict, judge) for case, verdict in wrong[:3]
    )
    return found


@pytest.mark.full
def test_a_loop_that_compares_with_other_targets(judge: Judge) -> None:
    assert judge(WITH_OTHER_TARGETS).kind == "refused"


def test_a_part_of_the_single_features(judge: Judge, request: pytest.FixtureRequest) -> None:
    stride = 83 if request.config.getoption("--full") else 498
    found = check(itertools.islice(single_features(), 7, None, stride), judge)
    contradictions = found.contradictions(PAGE.read_text())
    assert not contradictions, "\n".join(contradictions)


def test_the_page_has_what_became_of_each_feature() -> None:
    cells, reasons = documented(PAGE.read_text())
    rows = [(title, words(name)) for title, names in ROWS.items() for name in names]
    assert list(cells) == rows
    marks = {mark for row in cells.values() for marks in row.values() for mark in marks}
    assert marks - {"✓", "later"} == {f"({number})" for number in range(1, len(reasons) + 1)}


def test_some_combinations(judge: Judge, request: pytest.FixtureRequest) -> None:
    check(combinations(SEED, 20 if request.config.getoption("--full") else 3), judge)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_all_single_features(judge: Judge) -> None:
    check(single_features(), judge)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_many_combinations(judge: Judge) -> None:
    check(combinations(SEED + 1, 1000), judge)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_layout_can_do_is_refused_with_the_cause(name: str, judge: Judge) -> None:
    verdict = judge(Case((name,), layout="replicas", collectives="shared_memory"))
    assert verdict.kind == "refused", verdict
    assert any(words in verdict.text for words in REFUSED[name].split("|")), verdict


@pytest.mark.parametrize("entry", ["train", "session"])
@pytest.mark.parametrize(
    ("case", "kinds", "words"),
    [
        (Case(data="own_generator"), ("refused", "refused"), "is another one when it is read again"),
        (Case(data="stream_drawn_at_once"), ("equal", "equal"), ""),
        (Case(patches_class=True), ("refused", "equal"), "torch.nn.modules.linear.Linear.forward"),
    ],
    ids=["own-generator", "stream", "patched-class"],
)
def test_data_and_process_of_the_user(
    case: Case, kinds: tuple[str, str], words: str, entry: Literal["train", "session"], judge: Judge
) -> None:
    verdict = judge(replace(case, entry=entry, layout="replicas"))
    assert verdict.kind == kinds[entry == "session"], verdict
    assert verdict.kind == "equal" or words in verdict.text


def test_a_wrong_case_shrinks_to_what_makes_it_wrong() -> None:
    large = Case(
        ("linear", "counter", "gru", "alias"), layout="ZeRO 3", entry="session", output="dict", validates=True
    )
    smallest = shrink(large, lambda case: "counter" in case.features)
    assert smallest == replace(Case(), features=("counter",), layout="whole batch", steps=1)


def test_names_are_those_of_features() -> None:
    assert [name for name in ALWAYS if name not in FEATURES] == []
