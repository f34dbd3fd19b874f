"""Datasets with `labels` train a model of transformers by its own loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import wanma
from support.huggingface import FAMILIES, write_config
from support.labelled import LabelledTokens, whole
from support.own import seeded
from support.own_loop import started_by_launch
from support.ranks import Outcome, run_job, run_ranks
from wanma.data.batch import IGNORE_INDEX, Batch
from wanma.data.datasets.dataset import make_batch
from wanma.data.sampling.permutation import permute_indices
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.models.user_modules.label_task import find_label_task
from wanma.training.loss.loss_functions import CrossEntropy
from wanma.training.loss.target_counting import sum_and_count_losses
from wanma.training.loss.transformers_labels import (
    SampleClassificationLoss,
    default_per_target_losses,
    label_reader,
    prepare_for_decoder,
)

_SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pad_token_id": 0,
}
_BERT = transformers.BertConfig(**_SMALL, num_labels=3)
_LLAMA = transformers.LlamaConfig(**_SMALL, num_labels=3)
_T5 = transformers.T5Config(
    vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
)
_BART = transformers.BartConfig(
    vocab_size=50,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=16,
    decoder_ffn_dim=16,
)
_VIT = transformers.ViTConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8
)
_VIT.patch_size, _VIT.num_labels = 4, 3
_IDS = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(1))
_BY_TOKEN = torch.tensor(
    [[IGNORE_INDEX, 1, 2, 0, 1, 2], [1] * 6, [2, IGNORE_INDEX, 0, 1, IGNORE_INDEX, 1], [0] * 6]
)
_TOKENS = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS)}
_CLASSES = torch.tensor([0, 2, 1, 2])
_PIXELS = {"pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2))}


@pytest.mark.parametrize(
    ("name", "config", "given", "labels"),
    [
        ("LlamaForCausalLM", _LLAMA, _TOKENS, _BY_TOKEN),
        ("BertForMaskedLM", _BERT, _TOKENS, _BY_TOKEN),
        ("BertForTokenClassification", _BERT, _TOKENS, _BY_TOKEN),
        ("LlamaForTokenClassification", _LLAMA, _TOKENS, _BY_TOKEN),
        ("BertForSequenceClassification", _BERT, _TOKENS, _CLASSES),
        ("LlamaForSequenceClassification", _LLAMA, _TOKENS, _CLASSES),
        ("BertForSequenceClassification", _BERT, _TOKENS, torch.rand(4, 3).round()),
        ("BertForSequenceClassification", (_BERT, 1), _TOKENS, torch.rand(4).double()),
        ("ViTForImageClassification", _VIT, _PIXELS, _CLASSES),
        ("T5ForConditionalGeneration", _T5, _TOKENS, _BY_TOKEN),
        ("BartForConditionalGeneration", _BART, _TOKENS, _BY_TOKEN),
        (
            "BertForMultipleChoice",
            _BERT,
            {k: v.view(2, 2, 6) for k, v in _TOKENS.items()},
            _CLASSES[::2] // 2,
        ),
    ],
)
def test_the_loss_is_the_mean_that_the_models_own_class_computes(
    name: str, config: Any, given: dict[str, Tensor], labels: Tensor
) -> None:
    config, number = config if isinstance(config, tuple) else (config, None)
    settings = config.to_dict()
    if number:  # transformers before 5.4 reads the number off the names of labels
        settings = {key: value for key, value in settings.items() if key not in ("id2label", "label2id")}
        settings["num_labels"] = number
    config = config.__class__.from_dict(settings)
    model = seeded(lambda: getattr(transformers, name)(config)).eval()
    task = find_label_task(model)
    assert task is not None
    loss = SampleClassificationLoss(model.config) if task == "samples" else CrossEntropy(classes_last=True)
    batch = make_batch((), labels, np.arange(len(labels)), dict(given))
    read = label_reader(model, task)(batch)
    total, count = loss(model(**read.keywords), read)
    expected = model(**given, labels=labels.float() if labels.is_floating_point() else labels).loss
    assert (total / count).item() == pytest.approx(expected.item(), rel=2e-6)


class Renamed(transformers.BertForMaskedLM):
    """A subclass that leaves the forward alone."""


class Changed(transformers.LlamaForCausalLM):
    """A subclass with a forward of its own."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return super().forward(*args, **keywords)


def test_a_subclass_means_by_labels_what_its_forward_does() -> None:
    assert find_label_task(Renamed(_BERT)) == "classes"
    with pytest.raises(JobError, match="Changed has a custom forward") as error:
        find_label_task(Changed(_LLAMA))
    assert "pass a loss function" in (error.value.hint or "")
    assert find_label_task(nn.Linear(2, 2)) is None


def test_losses_that_are_not_known_or_couple_samples_are_refused() -> None:
    with pytest.raises(JobError, match="a loss that is not supported"):
        find_label_task(transformers.BartForCausalLM(_BART))
    routed = transformers.MixtralConfig(**{**_SMALL, "num_key_value_heads": 2}, output_router_logits=True)
    with pytest.raises(JobError, match="balancing loss that couples the samples"):
        find_label_task(transformers.MixtralForCausalLM(routed))


def _plain_loss(model: Any, data: LabelledTokens) -> float:
    with torch.no_grad():
        loss: float = model(**whole(data)).loss.item()
    return loss


def _job(**sections: Any) -> dict[str, Any]:
    return {
        "train": {
            "steps": 2,
            "global_batch": 24,
            "learning_rate": 1e-2,
            "precision": "fp64",
        },
        "checkpoint": {"every_steps": 0},
        **sections,
    }


@pytest.mark.parametrize(
    "plan",
    [pytest.param(Plan(micro_batch=24), marks=pytest.mark.exhaustive), Plan(dp_replicate=2, micro_batch=5)],
    ids=str,
)
def test_a_causal_model_trains_on_labels_by_the_loss_of_transformers(plan: Plan, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**FAMILIES["gpt2"], resid_pdrop=0.0, embd_pdrop=0.0)
    model = seeded(lambda: AutoModelForCausalLM.from_config(config)).double()
    job = _job(data={"validation_fraction": 0.0}, model={"factory": "transformers:GPT2LMHeadModel"})
    run = run_job(
        tmp_path,
        job,
        replace(plan, precision="fp64"),
        {
            "model": model,
            "data": LabelledTokens(),
        },
    )
    assert run.losses[0] == pytest.approx(_plain_loss(model.eval(), LabelledTokens()), rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "left"),
    [
        (Plan(dp_replicate=2, micro_batch=5), False),
        (Plan(pp=2, micro_batch=5), True),
        pytest.param(Plan(dp_replicate=2, micro_batch=5), True, marks=pytest.mark.exhaustive),
        pytest.param(Plan(pp=2, micro_batch=5), False, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_a_config_of_transformers_trains_on_the_same_dicts(plan: Plan, left: bool, tmp_path: Path) -> None:
    folder = write_config(tmp_path / "config", "llama")
    job = _job(
        model={"huggingface": str(folder)},
        data={
            "factory": "support.labelled:LabelledTokens",
            "arguments": {"left": left},
            "sequence_length": 8,
        },
    )
    job["data"]["validation_fraction"] = 0.0
    job["train"]["steps"] = 1
    job["train"]["learning_rate"] = 1e-12
    run = run_job(tmp_path / "run", job, replace(plan, precision="fp64"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).double().eval()
    weights = {n.removeprefix("model."): t for n, t in run.tensors().items() if n.startswith("model.")}
    model.load_state_dict(weights)
    assert run.losses[0] == pytest.approx(_plain_loss(model, LabelledTokens(left=left)), rel=1e-6)


def decoder_batch(**changed: Tensor) -> Batch:
    given = {"input_ids": _IDS, "attention_mask": torch.ones_like(_IDS), **changed}
    return make_batch((), _BY_TOKEN, np.arange(4), given)


def test_a_decoder_is_given_tokens_shifted_targets_and_padding_as_a_document() -> None:
    mask = torch.ones_like(_IDS)
    mask[0, -1] = 0
    read = prepare_for_decoder(decoder_batch(attention_mask=mask), keep_attention_mask=False)
    assert torch.equal(read.inputs[0], _IDS)
    assert read.targets[0].tolist() == [1, 2, 0, 1, 2, IGNORE_INDEX]
    assert torch.equal(read.keywords["documents"], mask)


def test_a_decoder_is_given_small_integers_as_it_is_given_others() -> None:
    masks = torch.ones_like(_IDS)
    masks[0, -1] = 0
    small = {"input_ids": _IDS.to(torch.uint16), "attention_mask": masks.to(torch.uint8)}
    found = prepare_for_decoder(
        make_batch((), _BY_TOKEN.clamp(min=0).to(torch.uint8), np.arange(4), small), keep_attention_mask=True
    )
    assert found.targets[:, -1].tolist() == [IGNORE_INDEX] * 4
    assert (found.inputs[0].dtype, found.keywords["documents"].tolist()) == (torch.int64, masks.tolist())


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"token_type_ids": _IDS}, "token_type_ids, which the model does"),
        ({"attention_mask": torch.zeros(4, 6, 6)}, "each of the 6 tokens"),
        ({"attention_mask": torch.zeros_like(_IDS)}, "a token that attention_mask masks out"),
    ],
)
def test_what_a_decoder_would_not_heed_is_refused(changed: dict[str, Tensor], told: str) -> None:
    with pytest.raises(WanmaError, match=told):
        prepare_for_decoder(decoder_batch(**changed), keep_attention_mask=False)


def test_the_losses_of_a_session_are_those_of_transformers_over_the_labels_that_count() -> None:
    data = LabelledTokens(size=6, vocabulary=50)
    given = whole(data)
    labels = given.pop("labels")
    batch = replace(make_batch((), labels, np.arange(6), given), target_key="labels")
    model = seeded(lambda: transformers.LlamaForCausalLM(_LLAMA)).eval()
    losses, counted = default_per_target_losses(model, model(**given), batch)
    expected = model(**given, labels=labels).loss
    assert (losses[counted].sum() / counted.sum()).item() == pytest.approx(expected.item(), rel=1e-6)
    total, count = sum_and_count_losses((losses, counted), batch)
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)


class Wrapped(nn.Module):
    """A module around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = transformers.LlamaForCausalLM(_LLAMA)

    def forward(self, **keywords: Tensor) -> Any:
        return self.inner(**keywords)


def test_labels_of_a_module_around_a_model_of_transformers_are_refused() -> None:
    given = whole(LabelledTokens(size=6, vocabulary=50))
    labels = given.pop("labels")
    batch = replace(make_batch((), labels, np.arange(6), given), target_key="labels")
    model = Wrapped()
    with pytest.raises(WanmaError, match="belong to their own position") as error:
        default_per_target_losses(model, model(**given), batch)
    assert "rename the key to `target`" in (error.value.hint or "")


def _session_in_rank(worker: WorkerContext, directory: Path, parallel: dict[str, Any]) -> None:
    job = {
        "data": {"validation_fraction": 0.25},
        "train": {"steps": 2, "global_batch": 18, "learning_rate": 1e-2, "validate_every_steps": 1},
        "parallel": parallel,
        "observe": {"console": "quiet"},
    }
    with started_by_launch(worker, directory), wanma.session(job) as session:
        model = session.prepare(seeded(lambda: transformers.LlamaForCausalLM(_LLAMA)))

        def losses(batch: Batch) -> Any:
            return session.losses(model(**batch.keywords), batch)

        for batch in session.batches(LabelledTokens(vocabulary=50), validate=losses):
            session.step(losses(batch))


def test_a_session_trains_on_labels_by_the_loss_of_transformers(tmp_path: Path) -> None:
    run_ranks(_session_in_rank, 2, (tmp_path, {"dp_shard": 2, "shard": "parameters", "micro_batch": 4}))
    rows = permute_indices(np.arange(18), 24, "validation split")
    data = whole(LabelledTokens(vocabulary=50))
    model = seeded(lambda: transformers.LlamaForCausalLM(_LLAMA))
    expected = model(**{key: tensor[rows] for key, tensor in data.items()}).loss.item()
    assert Outcome(tmp_path).losses[0] == pytest.approx(expected, rel=1e-6)
