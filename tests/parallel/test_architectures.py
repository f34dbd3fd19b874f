"""Causal architectures of transformers: trained as transformers trains them, or refused with a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.architectures import EDGES, KINDS, LAYOUTS, judge

SAMPLED = {
    # Multipliers around the blocks, in stages with and without blocks.
    "granite": ("pp 2", "pp 2, blocks last", "pp 2, blocks first"),
    # Windows and rotary angles by the number of a block; a scale inside of the embedding.
    "gemma3_text": ("tp 2", "pp 2"),
    # A head that is published under another name.
    "gpt_neox": ("1 rank", "pp 4"),
}
"""What a part of transformers' architectures is tried on every day."""


@pytest.mark.parametrize("kind", SAMPLED)
def test_an_architecture_trains_as_transformers_trains_it(kind: str, tmp_path: Path) -> None:
    every = {**LAYOUTS, **EDGES}
    verdict = judge(kind, {name: every[name] for name in SAMPLED[kind]}, tmp_path)
    assert verdict.refusal is None
    assert verdict.layouts == dict.fromkeys(SAMPLED[kind], "equal")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_trains_so_or_is_refused(kind: str, tmp_path: Path) -> None:
    verdict = judge(kind, {**LAYOUTS, **EDGES}, tmp_path)
    told = [verdict.refusal or "", *verdict.layouts.values()]
    assert not [reason for reason in told if reason.startswith(("wrong", "failed"))]
