"""The parity matrix: one job on one process and on every composition of the axes, in fp64.

Losses and gradient norms of every step, and the change of every parameter tensor, equal one process's. By
default every variant, every pair of axes and every axis with every kind of model occurs in a composition;
`--full` runs every pair of variants on one kind of model, half of those with a schedule; `--exhaustive` all
of them on all kinds. A few compositions run in fp32 as well, with what that precision leaves of losses and
norms.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.compare import EXACT_TRAIN, same_curve, same_training
from support.matrix import (
    DAILY,
    DAILY_FP32,
    EXPERTS,
    FP32,
    GLOBAL_BATCH,
    LENGTH,
    MODELS,
    VARIANTS,
    Case,
    cases,
    pairs,
    refusal,
    table,
)
from support.ranks import Outcome, run_job
from support.text import text_job
from wanma.job.plan.plan import Plan

STEPS = 2
"""The first shows what gradients are, the second what an update did; its own update, which is in the last
weights, what the optimizer kept."""
ONE = Plan(micro_batch=GLOBAL_BATCH, precision="fp64")

HUGGING_FACE = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_composition_follows_one_process:
        found = list(dict.fromkeys([*cases(metafunc.config.getoption("--exhaustive")), *DAILY]))
        marks = [() if case in DAILY else pytest.mark.full for case in found]
        params = [pytest.param(case, marks=mark) for case, mark in zip(found, marks, strict=True)]
        metafunc.parametrize("case", params, ids=[case.name for case in found])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Runs in one process and the weights that they start from, made once per model."""

    @cache
    def run(model: str) -> tuple[Outcome, Outcome]:
        start = job(model, folder, steps=1, learning_rate=1e-30, weight_decay=0.0)
        return (
            run_job(folder / f"{slug(model)}-start", start, ONE),
            run_job(folder / f"{slug(model)}-one", job(model, folder), ONE),
        )

    return run


@pytest.fixture(scope="module")
def reference_in_fp32(folder: Path) -> Any:
    """A run in one process, made once per model."""

    @cache
    def run(model: str) -> Outcome:
        low = replace(ONE, precision="fp32")
        return run_job(folder / f"{slug(model)}-fp32", job(model, folder, precision="fp32"), low)

    return run


def slug(model: str) -> str:
    return model.replace(" ", "-").replace(",", "")


@pytest.mark.slow
def test_every_composition_follows_one_process(
    case: Case, folder: Path, tmp_path: Path, reference: Any
) -> None:
    start, one = reference(case.model)
    other = run_job(tmp_path / "run", job(case.model, folder), case.plan)
    assert len(one.losses) == STEPS
    same_training(one, other, curve=1e-9, weights=1e-9, start=start)


@pytest.mark.parametrize(
    "case",
    [pytest.param(Case(*one, "fp32"), marks=() if one in DAILY_FP32 else pytest.mark.full) for one in FP32],
    ids=lambda case: case.name,
)
def test_in_fp32_every_axis_follows_one_process(
    case: Case, folder: Path, tmp_path: Path, reference_in_fp32: Any
) -> None:
    one = reference_in_fp32(case.model)
    other = run_job(tmp_path / "run", job(case.model, folder, precision="fp32"), case.plan)
    assert len(one.losses) == STEPS
    same_curve(one, other, 1e-5)


@pytest.mark.parametrize("which", [FP32, DAILY_FP32], ids=["full", "daily"])
def test_the_set_in_fp32_has_every_axis(which: tuple[tuple[tuple[str, ...], str], ...]) -> None:
    axes = {VARIANTS[variant][0] for variants, _ in which for variant in variants}
    assert axes == {axis for axis, _ in VARIANTS.values()}


def test_every_pair_of_axes_runs_every_day_and_every_axis_with_every_kind_of_model() -> None:
    assert set(DAILY) <= set(cases(exhaustive=True))
    assert {variant for case in DAILY for variant in case.variants} == set(VARIANTS)
    composable = {Case(pair, "").axes for pair in pairs() if refusal(pair) is None}
    assert len(composable) == 21, "each of seven axes with each other"
    assert composable == {case.axes for case in DAILY if len(case.axes) == 2}
    axes = {axis for axis, _ in VARIANTS.values()}
    suited = {(axis, model) for axis in axes for model in MODELS if axis != "ep" or model in EXPERTS}
    assert suited == {(axis, case.model) for case in DAILY for axis in case.axes}


def job(model: str, folder: Path, **train: Any) -> dict[str, Any]:
    section = dict(MODELS[model])
    if name := section.get("huggingface"):
        path = folder / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(HUGGING_FACE[name]))
        section["huggingface"] = str(path)
    keys = {**EXACT_TRAIN, "steps": STEPS, "global_batch": GLOBAL_BATCH, "validation_samples": 5, **train}
    data = {"document_masks": True}
    return text_job(folder, section, text=_texts(folder), sequence_length=LENGTH, data=data, **keys)


def test_the_documented_table_is_that_of_the_tests() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/parallel-compatibility.md").read_text()
    written = text.partition("<!-- matrix -->\n")[2].partition("<!-- /matrix -->")[0].strip()
    assert written == table().strip(), "put the output of `python tests/support/matrix.py` there"


def _texts(folder: Path) -> Path:
    """Many short texts: a sequence holds several documents, and not every position has a target."""
    texts = folder / "texts"
    if not texts.exists():
        texts.mkdir()
        lines = Path(argparse.__file__).read_text().splitlines()
        for number, start in enumerate(range(0, 600, 3)):
            (texts / f"{number:03}.txt").write_text("\n".join(lines[start : start + 1 + number % 3]))
    return texts
