"""Losses for datasets of `transformers`: dicts with `labels`, interpreted as by the model's own loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.data.batch import IGNORE_INDEX, Batch, widen_integers
from wanma.data.datasets.dataset import BatchedDataset, class_range
from wanma.data.datasets.map_dataset import UserDataset
from wanma.job.errors import JobError, WanmaError
from wanma.models.model_spec import ModelSpec
from wanma.models.user_modules.label_task import LABEL_KEYS, LabelTask, find_label_task, unwrap_peft_model
from wanma.parallel.parallelize import ParallelModel
from wanma.training.loss.loss_functions import (
    CrossEntropy,
    LossFunction,
    full_output,
    logits_of,
    require_single_target,
    squared_error,
    wrap_user_loss,
)
from wanma.training.loss.target_counting import Losses, sum_and_count_losses

_DECODER_KEYWORDS = {"attention_mask": "documents", "position_ids": "positions"}
"""Keys that wanma's decoders and `model.huggingface` take, and the keywords by which they take them."""


def default_loss(spec: ModelSpec, data: BatchedDataset, parallel_model: ParallelModel) -> LossFunction:
    """Return the loss of a job that names none: that of the model's own library, or cross entropy.

    It also tells the user's own data how the model interprets `labels`.

    Raises:
        JobError: the data have labels, and the loss of the model's class is not known.
    """
    # A module of the user's may have kept its logits, to look at later.
    plain = CrossEntropy(
        overwrite_logits=spec.parallel_spec is not None, classes_last=spec.parallel_spec is not None
    )
    if not isinstance(data, UserDataset):
        return replace(plain, classes_last=plain.classes_last or data.input_kind == "tokens")
    if data.has_number_targets:
        return wrap_user_loss(squared_error)
    if spec.input_kind == "tokens":
        data.read_labels = partial(
            prepare_for_decoder, keep_attention_mask=parallel_model.pipeline is not None
        )
        return plain
    if len(parallel_model.model_parts) > 1 or parallel_model.pipeline is not None:
        return plain
    model = parallel_model.module
    try:
        task = find_label_task(model)
    except JobError as error:
        data.read_labels = partial(_raise, error)
        return plain
    if task is None:
        return plain
    data.read_labels = label_reader(model, task)
    if task == "samples":
        return SampleClassificationLoss(unwrap_peft_model(model).config)
    return replace(plain, classes_last=True)


def default_per_target_losses(
    model: nn.Module, output: Any, batch: Batch, data: BatchedDataset | None = None
) -> Losses:
    """Return one loss per target, perhaps with a mask of those that count, by the rule of `default_loss`.

    Args:
        data: data of the batch; None: no table of numbers.

    Raises:
        JobError: the batch has `labels`, and the loss of the model's class is not known.
    """
    if isinstance(data, UserDataset) and data.has_number_targets:
        return squared_error(full_output(output), batch.targets)
    has_labels = batch.target_key in LABEL_KEYS and batch.named_targets is None
    task = find_label_task(model) if has_labels else None
    if task == "causal":
        batch = _prepare_for_causal(batch)
    if task == "samples":
        return SampleClassificationLoss(unwrap_peft_model(model).config).losses(output, batch)
    return CrossEntropy(classes_last=task is not None).losses(output, batch)


def shift_labels(labels: Tensor) -> Tensor:
    """Return the targets of (rows, sequence) labels: at each position the next one, and none at the last."""
    return torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORE_INDEX)], dim=1)


def label_reader(model: nn.Module, task: LabelTask) -> Callable[[Batch], Batch]:
    """Return the function that prepares a batch with `labels` for a transformers model."""
    if task == "causal":
        return _prepare_for_causal
    if task == "sequence_to_sequence":
        prepare: Any = unwrap_peft_model(model).prepare_decoder_input_ids_from_labels

        def for_decoder(batch: Batch) -> Batch:
            if {"decoder_input_ids", "decoder_inputs_embeds"} & set(batch.keywords):
                return batch
            return replace(
                batch, keywords={**batch.keywords, "decoder_input_ids": prepare(labels=batch.wide_targets)}
            )

        return for_decoder
    return lambda batch: batch


def prepare_for_decoder(batch: Batch, *, keep_attention_mask: bool) -> Batch:
    """Prepare a batch of input_ids, labels and perhaps attention_mask and position_ids for a wanma decoder.

    Padding becomes a document of its own, which no token sees.

    Args:
        batch: batch of samples.
        keep_attention_mask: true if an attention_mask that masks nothing stays, because all batches must
            have it.

    Raises:
        WanmaError: keys that the model would not be given, masks of other shapes, or a target that is
            predicted from padding.
    """
    keywords = {name: widen_integers(tensor) for name, tensor in batch.keywords.items()}
    inputs = (keywords.pop("input_ids"),) if "input_ids" in keywords else batch.inputs
    if unknown := sorted(set(keywords) - set(_DECODER_KEYWORDS)):
        raise WanmaError(
            f"data: samples have {', '.join(unknown)}, which the model does not accept",
            "keep input_ids, labels, attention_mask and position_ids, and remove the others",
        )
    batch = _prepare_for_causal(replace(batch, inputs=inputs, keywords=keywords))
    mask = keywords.pop("attention_mask", None)
    decoder_keywords = {_DECODER_KEYWORDS[name]: tensor for name, tensor in keywords.items()}
    if mask is not None and (keep_attention_mask or not bool(mask.all())):
        if mask.shape != batch.targets.shape:
            raise WanmaError(
                f"data: attention_mask has the shape {tuple(mask.shape[1:])} per sample, but must have "
                f"one value for each of the {batch.targets.shape[1]} tokens",
                "remove it, or set 1 for tokens and 0 for padding",
            )
        if bool(((batch.targets != IGNORE_INDEX) & (mask == 0)).any()):
            raise WanmaError(
                "data: a label is predicted from a token that attention_mask masks out",
                f"set the labels of padding to {IGNORE_INDEX}",
            )
        decoder_keywords["documents"] = mask.long()
    return replace(batch, keywords=decoder_keywords)


def _raise(error: JobError, _: Batch) -> Batch:
    raise error


def _prepare_for_causal(batch: Batch) -> Batch:
    tokens = batch.keywords.get("input_ids", batch.inputs[0] if batch.inputs else batch.targets)
    if batch.targets.ndim != 2 or batch.targets.shape != tokens.shape[:2]:
        raise WanmaError(
            f"data: labels have the shape {tuple(batch.targets.shape[1:])} per sample for tokens of "
            f"{tuple(tokens.shape[1:])}, but a causal language model needs one label per token",
            f"make labels of the shape of input_ids, with {IGNORE_INDEX} for tokens without a target; put "
            "other targets under the key `target`",
        )
    targets = shift_labels(batch.wide_targets)
    return replace(batch, targets=targets, class_range=class_range(targets))


@dataclass(frozen=True)
class SampleClassificationLoss:
    """Loss of transformers' classifiers of complete samples, by the config's `problem_type`."""

    config: Any

    def __call__(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of real targets, and their number; an ignored class is none."""
        return sum_and_count_losses(self.losses(output, batch), batch)

    def losses(self, output: Any, batch: Batch) -> Losses:
        """Return one loss per target, and a mask of those that count."""
        require_single_target(batch, "the model's own loss", "pass a custom loss that takes the dict")
        logits, labels = logits_of(output), batch.targets
        kind = self._problem(labels)
        if kind == "single_label_classification":
            return CrossEntropy(classes_last=True).losses(logits, replace(batch, targets=labels.flatten()))
        losses = _elementwise(kind, logits, labels)
        return losses, torch.ones_like(losses, dtype=torch.bool)

    def _problem(self, labels: Tensor) -> str:
        """Return the problem type, as transformers infer it from the first batch."""
        problem_type = self.config.problem_type
        if problem_type is not None:
            return str(problem_type)
        if self.config.num_labels == 1:
            return "regression"
        is_class = labels.dtype in (torch.int64, torch.int32)
        return "single_label_classification" if is_class else "multi_label_classification"


def _elementwise(kind: str, logits: Tensor, labels: Tensor) -> Tensor:
    if logits.numel() != labels.numel():
        raise WanmaError(
            f"the model returns logits of shape {tuple(logits.shape)} for labels of {tuple(labels.shape)}",
            "fix the labels, or num_labels and problem_type of the config",
        )
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    measured = labels.reshape(logits.shape).to(precise.dtype)
    if kind == "regression":
        return (precise - measured).square()
    return F.binary_cross_entropy_with_logits(precise, measured, reduction="none")
