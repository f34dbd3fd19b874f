"""Rejection, each with a remedy, of models that a probe finds wanma to train otherwise than transformers.

A remedy that names keys of the config has been tried: the model is built with it, without memory, and
probed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from wanma.job.errors import JobError
from wanma.job.file.serialization import value_text
from wanma.models.huggingface.derived_parallel_spec import find_block_list
from wanma.models.huggingface.forward_probe import ProbeResult, probe
from wanma.models.huggingface.validation import TESTED_FAMILIES

ModelBuilder = Callable[[PreTrainedConfig], PreTrainedModel]
"""Function that builds the adapted model of a config."""


def require_same_training(
    model: PreTrainedModel, sequence_length: int, build_model: ModelBuilder
) -> ProbeResult:
    """Probe a model, and reject it if training would differ from transformers' own.

    Args:
        model: the adapted model, on the meta device.
        sequence_length: of the data.
        build_model: builds a model for trying remedies; called with the meta device as the default.

    Raises:
        JobError: attention sees other tokens than all earlier ones, or random numbers are drawn by rank.
    """
    findings = _probe(model, sequence_length)
    kind, config = type(model).__name__, model.config

    def probe_changed(overrides: Mapping[str, Any]) -> ProbeResult | None:
        """Return the findings of the model with other settings; None if it cannot be built."""
        changed_config = copy.deepcopy(config)
        try:
            for key, value in overrides.items():
                setattr(changed_config, key, value)
            with torch.device("meta"):
                return _probe(build_model(changed_config), sequence_length)
        except Exception:  # whatever a family says of settings that it does not know
            return None

    if not findings.is_causal:
        changed_findings = (
            probe_changed({"is_decoder": True}) if getattr(config, "is_decoder", None) is False else None
        )
        alternative = ""
        if changed_findings is not None and changed_findings.is_causal:
            alternative = ", or train this one as a decoder with model.arguments = {is_decoder = true}"
        raise JobError(
            f"model.huggingface: {kind} is not a causal language model with its config: "
            f"{findings.mask_difference}",
            f"use the config of a causal language model{alternative}",
        )
    if findings.max_sequence_length is not None:
        raise JobError(
            f"data.sequence_length = {sequence_length}, but {kind} has position embeddings for only "
            f"{findings.max_sequence_length} tokens",
            f"set data.sequence_length to at most {findings.max_sequence_length}",
        )
    if findings.attention_window is not None:
        changed_findings = (
            probe_changed({"sliding_window": None}) if getattr(config, "sliding_window", None) else None
        )
        alternative = ""
        if changed_findings is not None and changed_findings.mask_difference is None:
            alternative = ", or model.arguments = {sliding_window = 'null'}"
        window = getattr(config, "sliding_window", None)
        problem = f"its config has sliding_window = {window}" if window else findings.mask_difference
        raise JobError(
            f"model.huggingface: {problem}, but wanma's attention covers the whole sequence of "
            f"{sequence_length} tokens",
            f"set data.sequence_length to at most {findings.attention_window}{alternative}",
        )
    if findings.random_draw is not None:
        _reject_random_draws(kind, config, findings.random_draw, probe_changed)
    return findings


def _probe(model: PreTrainedModel, sequence_length: int) -> ProbeResult:
    blocks = find_block_list(model)
    assert blocks is not None
    return probe(model, blocks, sequence_length, keyed_dropout=model.config.model_type in TESTED_FAMILIES)


def _reject_random_draws(
    kind: str,
    config: PreTrainedConfig,
    draws: str,
    probe_changed: Callable[[Mapping[str, Any]], ProbeResult | None],
) -> None:
    """Raise an error that names all settings that make a model draw by rank, and no others."""
    settings = {
        key: value
        for key, value in config.to_dict().items()
        if any(word in key for word in _RANDOM_SETTING_WORDS) and type(value) in (int, float) and value > 0
    }
    overrides = dict.fromkeys(settings, 0.0)
    findings_without_draws = probe_changed(overrides)
    if findings_without_draws is None or findings_without_draws.random_draw is not None:
        raise JobError(
            f"model.huggingface: {kind} draws random numbers in training ({draws}) that depend on the rank",
            "pass the model as model.factory",
        )
    for key in settings:
        reduced = {name: value for name, value in overrides.items() if name != key}
        findings = probe_changed(reduced)
        if findings is not None and findings.random_draw is None:
            overrides = reduced
    settings_text = ", ".join(f"{key} = {value_text(settings[key])}" for key in overrides)
    remedy = ", ".join(f"{key} = 0.0" for key in overrides)
    raise JobError(
        f"model.huggingface: its config has {settings_text}, with which {kind} draws random numbers that "
        "depend on "
        f"the rank ({draws})",
        f"set model.arguments = {{{remedy}}}",
    )


_RANDOM_SETTING_WORDS = ("drop", "noise", "jitter")
"""Parts of the names of settings that make a model draw."""
