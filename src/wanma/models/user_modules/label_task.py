"""Label task: the meaning of `labels` in the loss that a `transformers` model's class defines.

Nothing is imported that the user's program has not imported: a transformers model cannot exist otherwise.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any, Literal

from torch import nn

from wanma.job.errors import JobError

LabelTask = Literal["causal", "classes", "samples", "sequence_to_sequence"]
"""Label task of a model, by its loss.

causal: cross entropy of (rows, sequence, classes), labels[i] predicted from position i - 1; classes: cross
entropy of (..., classes), each label at its own place; samples: by `problem_type`, cross entropy, squares or
binary cross entropy of (rows, labels); sequence_to_sequence: as classes, and the decoder reads the labels
shifted.
"""

LABEL_KEYS = ("label", "labels")
"""Keys of a dict sample under which datasets for transformers have their targets."""

_TASK_BY_LOSS: dict[str, LabelTask] = {
    "ForCausalLMLoss": "causal",
    "ForMaskedLMLoss": "classes",
    "ForTokenClassification": "classes",
    "ForSequenceClassificationLoss": "samples",
}
"""Tasks by transformers' loss functions (`LOSS_MAPPING`) that are means over labels which are not -100."""
_TASK_BY_REGISTRY: tuple[tuple[str, LabelTask], ...] = (
    ("SEQ_TO_SEQ_CAUSAL_LM", "sequence_to_sequence"),
    ("MASKED_LM", "classes"),
    ("TOKEN_CLASSIFICATION", "classes"),
    ("MULTIPLE_CHOICE", "classes"),
    ("AUDIO_CLASSIFICATION", "classes"),
    ("SEQUENCE_CLASSIFICATION", "samples"),
    ("IMAGE_CLASSIFICATION", "samples"),
    ("VIDEO_CLASSIFICATION", "samples"),
)
"""Tasks by registry, for classes that implement their own loss: all of a registry implement the same."""


def find_label_task(model: nn.Module) -> LabelTask | None:
    """Return the meaning of `labels` to a transformers model; None for another model.

    Raises:
        JobError: its class has a loss that is not known here, or one that couples samples.
    """
    base_model = unwrap_peft_model(model)
    if not is_transformers_model(base_model):
        return None
    kind = _class_with_forward(base_model)
    name = kind.__name__
    if not kind.__module__.startswith("transformers."):
        raise _unknown_loss_error(name, f"{name} has a custom forward")
    config: Any = base_model.config
    parts = (config, getattr(config, "text_config", None))
    if any(getattr(part, "output_router_logits", False) for part in parts):
        raise _unknown_loss_error(
            name, "output_router_logits adds a balancing loss that couples the samples of a micro-batch"
        )
    task = _determine_task(base_model, kind)
    if task is None:
        raise _unknown_loss_error(name, f"{name} computes a loss that is not supported")
    return task


def is_transformers_model(model: object) -> bool:
    """Return True if a model is of one of transformers' classes, or derived from one."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def unwrap_peft_model(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper of `peft`; other models unchanged.

    Raises:
        JobError: the wrapper puts virtual tokens before those of the data.
    """
    library = sys.modules.get("peft")
    if library is None or not isinstance(model, library.PeftModel):
        return model
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise JobError(
            f"{type(model).__name__} adds virtual tokens (prompt learning), but the labels cover only the "
            "tokens of the data",
            "pass a loss function: loss= of wanma.train, model.loss of a job",
        )
    base: nn.Module = model.get_base_model()
    return base


def _determine_task(model: Any, kind: type) -> LabelTask | None:
    """Determine the task by the loss function that the class calls, or by the registries that list it."""
    try:
        source = inspect.getsource(kind.forward)  # type: ignore[attr-defined]  # it was found by that
    except OSError:
        source = ""
    decodes = bool(getattr(model.config, "is_encoder_decoder", False))
    task: LabelTask | None
    if "self.loss_function(" in source:
        # A class without a type has the loss of causal models; asking for it would warn.
        has_default_loss = model.loss_type is None and not hasattr(model, "_loss_function")
        task = "causal" if has_default_loss else _TASK_BY_LOSS.get(model.loss_function.__name__)
        if decodes and task in ("causal", "classes"):
            return "sequence_to_sequence" if task == "classes" and _shifts_labels(model, source) else None
        return task
    from transformers.models.auto import modeling_auto

    names = {entry.__name__ for entry in kind.__mro__}
    for registry, task in _TASK_BY_REGISTRY:
        listed_names = getattr(modeling_auto, f"MODEL_FOR_{registry}_MAPPING_NAMES", {}).values()
        if names & {
            name for entry in listed_names for name in ([entry] if isinstance(entry, str) else entry)
        }:
            if task == "sequence_to_sequence" and not _shifts_labels(model, source):
                return None
            return task
    return None


def _shifts_labels(model: object, source: str) -> bool:
    """Return True if an encoder-decoder's forward derives the decoder's inputs from the labels."""
    shifts = re.search(r"shift\w*\(\s*labels\b", source) is not None
    return shifts and hasattr(model, "prepare_decoder_input_ids_from_labels")


def _class_with_forward(model: nn.Module) -> type:
    return next(kind for kind in type(model).__mro__ if "forward" in vars(kind))


def _unknown_loss_error(name: str, reason: str) -> JobError:
    return JobError(
        f"the meaning of the labels follows from the loss inside {name}, which wanma cannot use: {reason}",
        "pass a loss function (loss= of wanma.train, model.loss of a job): (output, targets) -> one loss per "
        "target, with the output of the model without labels",
    )
