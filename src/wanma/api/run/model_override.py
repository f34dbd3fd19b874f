"""Override of the `[model]` section for a job whose model is a Python object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.job.file.parser import parse_config_file

_MODEL_SOURCE_KEYS = {"preset", "family", "factory", "huggingface"}


def override_model_name(job: Any, overrides: Sequence[str], name: str) -> Sequence[str]:
    """Add an override that names the object, unless the job names a model itself.

    Other keys of `[model]`, such as `batch_norm_group` and `lora_rank`, stay the job's.

    Args:
        job: job in any form that `to_job` accepts.
        name: "package.module:Class" of the object.
    """
    if isinstance(job, str | Path):
        job = parse_config_file(Path(job))[0]
    if not isinstance(job, Mapping):
        return overrides
    model = job.get("model") or {}
    if not isinstance(model, Mapping) or _MODEL_SOURCE_KEYS & set(model):
        return overrides
    if any(text.startswith(tuple(f"model.{source}" for source in _MODEL_SOURCE_KEYS)) for text in overrides):
        return overrides
    return [*overrides, f"model.factory={name}"]
