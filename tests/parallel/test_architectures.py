"""Causal architectures of transformers: trained as transformers trains them, or refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

import support.architectures
from support.architectures import (
    EDGES,
    KINDS,
    LAYOUTS,
    Verdict,
    judge,
    judge_together,
    mend,
    short,
    tiny_config,
)
from wanma.models.huggingface.installed_transformers import VERSION, version_tuple

PAGE = Path(support.architectures.__file__).parents[2] / "docs" / "reference" / "architectures.md"
SAMPLED = {
    # Multipliers around the blocks, in stages with and without blocks.
    "granite": ("pp 2, blocks last", "pp 2, blocks first"),
    # Windows and rotary angles by the number of a block; a scale inside of the embedding.
    "gemma3_text": ("tp 2", "pp 2"),
    # A head that is published under another name.
    "gpt_neox": ("pp 4",),
    # Positions that begin after the padding's, and a tie within the last stage.
    "roberta": ("pp 2", "cp 2"),
    # A second table of tokens, for each block.
    "gemma3n_text": ("dp 2",),
}
"""Layouts on which a part of transformers' architectures is tried in continuous integration."""


@pytest.fixture(scope="module")
def sampled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """Verdicts of those of `SAMPLED` that this session asks for, of one launch of ranks."""
    every = {**LAYOUTS, **EDGES}
    asked = {kind for item in request.session.items for kind in [_sampled_kind(item)] if kind is not None}
    wanted = {kind: {name: every[name] for name in names} for kind, names in SAMPLED.items() if kind in asked}
    return {verdict.kind: verdict for verdict in judge_together(wanted, tmp_path_factory.mktemp("sampled"))}


def _sampled_kind(item: pytest.Item) -> str | None:
    if (
        isinstance(item, pytest.Function)
        and item.function is test_an_architecture_trains_as_transformers_trains_it
    ):
        return str(item.callspec.params["kind"])
    return None


@pytest.mark.full
@pytest.mark.parametrize("kind", SAMPLED)
def test_an_architecture_trains_as_transformers_trains_it(kind: str, sampled: dict[str, Verdict]) -> None:
    if kind == "gemma3_text" and version_tuple(VERSION) < (5, 3):
        pytest.skip("transformers before 5.3 publishes no plan for the norms of Gemma 3's heads")
    verdict = sampled[kind]
    assert verdict.refusal is None
    assert verdict.layouts == dict.fromkeys(SAMPLED[kind], "equal")
    assert [documented()[kind][name] for name in SAMPLED[kind]] == ["✓"] * len(SAMPLED[kind])


@pytest.mark.parametrize(
    "kind", ["bart", "bloom", "deepseek_v3", "doge", "dots3_note_text", "falcon", "gemma2", "lfm2", "mamba"]
)
def test_the_page_says_why_an_architecture_is_refused(kind: str) -> None:
    if kind not in KINDS:
        pytest.skip(f"transformers {VERSION} has no {kind}")
    verdict = Verdict(kind)
    assert mend(tiny_config(kind), verdict) is None
    assert verdict.refusal is not None
    row = next(line for line in PAGE.read_text().splitlines() if f" {kind}," in line or f" {kind} |" in line)
    assert row.endswith(f"| {short(verdict.refusal)} |")


def documented() -> dict[str, dict[str, str]]:
    """Rows of the page's table: architecture -> layout -> verdict."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows if len(row) == len(rows[0])}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_trains_so_or_is_refused(kind: str, tmp_path: Path) -> None:
    verdict = judge(kind, {**LAYOUTS, **EDGES}, tmp_path)
    told = [verdict.refusal or "", *verdict.layouts.values()]
    assert not [reason for reason in told if reason.startswith(("wrong", "failed"))]
