"""Models of transformers that wanma would train otherwise than transformers: refused, with a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.architectures import Verdict, mend, tiny_config
from support.huggingface import skip_if_refused
from support.text import text_spec
from wanma.job.errors import JobError
from wanma.job.sections.model import ModelSection


def refusal(folder: Path, config: dict[str, Any], length: int = 16) -> JobError:
    (folder / "config.json").write_text(json.dumps(config))
    section = ModelSection(huggingface=str(folder))
    with pytest.raises(JobError) as raised:
        text_spec(section, sequence_length=length)
    return raised.value


@pytest.mark.parametrize(
    "kind",
    ["bert", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("electra", "roberta"))],
)
def test_a_model_that_sees_later_tokens_is_no_causal_one(kind: str, tmp_path: Path) -> None:
    config = tiny_config(kind)
    error = refusal(tmp_path, config)
    assert "not a causal language model" in error.message
    assert "SelfAttention attends to later tokens" in error.message
    assert error.hint is not None
    assert "model.arguments = {is_decoder = true}" in error.hint
    found = mend({**config, "is_decoder": True}, Verdict(kind))
    assert found is not None


def test_an_encoder_with_a_decoder_is_not_told_to_deny_it(tmp_path: Path) -> None:
    for kind in ("whisper", "bart", "t5"):
        error = refusal(tmp_path, {"model_type": kind})
        assert "causal language model" in error.message
        assert error.hint == "use the config of a causal language model"


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "bloom", "mpt"])
def test_attention_that_cannot_be_replaced_is_told(kind: str, tmp_path: Path) -> None:
    assert "it does not use the attention interface" in refusal(tmp_path, tiny_config(kind)).message


def test_all_settings_that_draw_are_told_in_one_error(tmp_path: Path) -> None:
    error = refusal(tmp_path, {**tiny_config("phi"), "pad_token_id": 1})  # transformers 5.0 needs it
    keys = ("resid_pdrop", "embd_pdrop", "attention_dropout")
    assert all(f"{key} = 0.1" in error.message for key in keys)
    assert error.hint == f"set model.arguments = {{{', '.join(f'{key} = 0.0' for key in keys)}}}"


def test_settings_that_draw_nothing_are_not_told(tmp_path: Path) -> None:
    skip_if_refused("gpt2")
    config = {**tiny_config("gpt2"), "summary_first_dropout": 0.1}
    assert refusal(tmp_path, config).hint == "set model.arguments = {attn_pdrop = 0.0}"


def test_a_window_that_the_config_switches_off_is_none(tmp_path: Path) -> None:
    config = {**tiny_config("qwen2_moe"), "sliding_window": 4, "use_sliding_window": False}
    assert "routed experts" in refusal(tmp_path, config).message


def test_a_window_is_as_long_as_it_is_computed(tmp_path: Path) -> None:
    config = {**tiny_config("gemma3_text"), "attention_dropout": 0.0}
    error = refusal(tmp_path, config)
    assert "sliding_window = 8, " in error.message
    assert error.hint == "set data.sequence_length to at most 8"
    assert mend(config, Verdict("gemma3_text")) == (config, 8)


def test_attention_that_would_be_computed_otherwise_is_refused_before_training(tmp_path: Path) -> None:
    config = {**tiny_config("gemma2"), "attention_dropout": 0.0}
    error = refusal(tmp_path, config, length=8)
    assert "unsupported attention options: softcap" in error.message


def test_positions_are_counted_from_the_families_own_first_one(tmp_path: Path) -> None:
    config = {key: 0.0 if "drop" in key else value for key, value in tiny_config("roberta").items()}
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_decoder": True}))
    section = ModelSection(huggingface=str(tmp_path))
    torch.manual_seed(1)
    made = text_spec(section).build_module()
    tokens = torch.randint(3, 257, (2, 16))
    with torch.no_grad():
        alone = made(tokens)
        given = made(tokens, None, torch.arange(16))
    assert torch.equal(alone, given)
    error = refusal(tmp_path, {**config, "is_decoder": True}, length=63)
    assert "for only 62 tokens" in error.message
    assert error.hint == "set data.sequence_length to at most 62"
