"""Settings of a run that its checkpoints record, and the effect of another value on a resume.

`SETTING_RULES` has a rule for each key of a job. The refusals of a resume and the table in
docs/reference/job-file.md both follow from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wanma.job.file.serialization import value_text
from wanma.job.sections.job import Job

SettingRule = Literal["identity", "remaining", "content", "position", "free"]

RULE_TEXTS: Mapping[SettingRule, str] = {
    "identity": "refused: the run is of another model, of other data or of another optimization; "
    '`checkpoint.resume = "changed"` accepts it while steps remain',
    "remaining": "accepted while steps remain, which follow the new value; refused where the run is complete",
    "content": "what it yields is compared: samples, their order, the code of the loss, the settings of the "
    'model; a difference is refused as above, and accepted with "changed"',
    "position": "refused where it changes the position in the data; a later stage may change",
    "free": "accepted",
}
"""Effect of another value before a resume, by rule."""

SETTING_RULES: Mapping[SettingRule, Mapping[str, tuple[str, ...]]] = {
    "identity": {
        "data": ("image_transform", "sequence_length", "document_masks", "validation_fraction"),
        "train": (
            "precision",
            "fp8",
            "optimizer",
            "embedding_optimizer",
            "optimizer_factory",
            "optimizer_arguments",
            "learning_rate",
            "weight_decay",
            "betas",
            "epsilon",
            "momentum",
            "parameter_groups",
            "gradient_clip",
            "seed",
        ),
        "checkpoint": ("start_from",),
    },
    "remaining": {
        "data": ("bad_data",),
        "train": (
            "steps",
            "schedule",
            "schedule_factory",
            "warmup_steps",
            "final_learning_rate_share",
            "weight_average",
            "non_finite",
            "spike",
            "spike_deviations",
            "loss_scale",
            "stop_patience",
            "stop_metric",
            "stop_mode",
            "stop_min_delta",
        ),
        "parallel": (
            "compression",
            "compression_share",
            "compression_rank",
            "compression_from_step",
            "compression_groups",
            "synchronize",
            "sites",
            "synchronize_every",
            "synchronous_steps",
            "outer_learning_rate",
            "outer_momentum",
            "fragments",
            "overlap_steps",
            "overlap_mixing_factor",
            "outer_compression",
            "staleness",
        ),
        "servers": ("mode", "staleness", "compression"),
    },
    "content": {
        "model": ("*",),
        "data": (
            "path",
            "kind",
            "format",
            "columns",
            "chat",
            "text",
            "sources",
            "images",
            "interactions",
            "factory",
            "arguments",
            "tokenizer",
            "shuffle",
            "block_samples",
            "window_blocks",
            "placement",
            "part_order",
        ),
    },
    "position": {"train": ("global_batch", "batch_ramp")},
    "free": {
        "data": (
            "cache",
            "cache_bytes",
            "probe_store",
            "store_retry_seconds",
            "bad_data_limit",
            "prefetch",
            "prefetch_bytes",
            "workers",
            "shared_reading",
            "worker_processes",
            "check_reads",
        ),
        "train": ("check_code", "validate_every_steps", "validation_samples", "metrics", "deterministic"),
        "parallel": ("*",),
        "servers": ("*",),
        "cluster": ("*",),
        "checkpoint": ("*",),
        "observe": ("*",),
    },
}
"""Names of keys, by rule and section; "*": all other keys of the section."""

MODEL_PREFIX = "model."
"""Prefix of the settings of a model, which come from its resolved configuration and not from its keys."""
_START = "checkpoint.start_from"


@dataclass(frozen=True)
class SettingDifference:
    """Setting with another value than a checkpoint has."""

    key: str
    saved: Any
    current: Any

    def __str__(self) -> str:
        return f"{self.key} was {value_text(self.saved)}, and is {value_text(self.current)}"

    @property
    def rule(self) -> SettingRule:
        return "identity" if self.key.startswith(MODEL_PREFIX) else rule_of(*self.key.split(".", 1))


def rule_of(section: str, key: str) -> SettingRule:
    """Return the rule of a key of the job.

    Raises:
        KeyError: the table has none.
    """
    for name in (key, "*"):
        for rule, keys_by_section in SETTING_RULES.items():
            if name in keys_by_section.get(section, ()):
                return rule
    raise KeyError(f"{section}.{key}")


def run_settings(job: Job, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run's checkpoints record, as JSON values by key.

    Args:
        job: job of the run.
        model: settings of the model by name (`ModelSpec.settings`).
    """
    values = {f"{MODEL_PREFIX}{name}": value for name, value in model.items()}
    for rule in ("identity", "remaining"):
        for section, names in SETTING_RULES[rule].items():
            content = getattr(job, section).model_dump(mode="json", include=set(names))
            values |= {f"{section}.{name}": content[name] for name in names}
    # A manifest has no infinity; a config of transformers may.
    recorded: dict[str, Any] = json.loads(json.dumps(values, default=str), parse_constant=str)
    return recorded


def setting_differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], *, is_model_only: bool = False
) -> Iterator[SettingDifference]:
    """Yield the settings that two runs both record with different values.

    A run that goes on may leave out the folder from which it started.

    Args:
        saved: settings of a checkpoint; older ones have fewer, or none.
        current: settings of the run now.
        is_model_only: compare the models alone.
    """
    for key, value in current.items():
        if is_model_only and not key.startswith(MODEL_PREFIX):
            continue
        if key in saved and saved[key] != value and not (key == _START and value is None):
            yield SettingDifference(key, saved[key], value)


def merge_settings(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the next checkpoints of a run record."""
    merged = {**saved, **current}
    if current.get(_START) is None and _START in saved:
        merged[_START] = saved[_START]
    return merged
