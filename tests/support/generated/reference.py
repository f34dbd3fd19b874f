"""A plain PyTorch loop over the global batch: what every case is measured against.

Of wanma it takes what is documented to be wanma's own: the order of the samples, dropout keyed by sample, and
batch normalization over groups of samples.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from support.generated.case import Case
from support.generated.optimizers import BUILT_IN
from wanma.data.datasets.map_dataset import wrap_user_dataset
from wanma.job.sections.data import DataSection
from wanma.job.sections.job import Job
from wanma.models.keyed_random.dropout import bind_samples, replace_dropout
from wanma.models.layers.batch_norm import convert_batch_norm, find_step_statistics_modules
from wanma.training.optimizer.learning_rate_schedule import learning_rate_at


@dataclass(frozen=True)
class Trained:
    """End state of a run."""

    tensors: dict[str, Tensor]
    """Parameters and saved buffers by name; of those with several names, the first."""
    losses: list[float]
    validation: float | None = None


class _Rows:
    """A data set whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, 0


def plain_loop(case: Case, own: types.ModuleType) -> Trained:
    """Train as the user's own loop would: AdamW or an own optimizer, the gradient clipped by its norm."""
    torch.manual_seed(1)
    job = Job.model_validate(case.job())
    train = job.train
    model, data = own.make(), own.Data()
    model.train() if not any(not module.training for module in model.modules()) else None
    if case.precision == "fp64":
        model.double()
    if (group := job.model.batch_norm_group) is not None:
        model = convert_batch_norm(model, group)
    replace_dropout(model)
    noting = find_step_statistics_modules(model)
    groups = [{"params": list(nn.Module.parameters(model)), "weight_decay": case.weight_decay}]
    if case.optimizer == BUILT_IN:
        optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas, eps=train.epsilon)
    else:
        optimizer = own.Own(groups, lr=train.learning_rate)
    rows_of = _Rows(len(data))
    order = wrap_user_dataset(
        (rows_of, _Rows(20)) if case.validates else rows_of,
        DataSection(validation_fraction=0.0),
        train.seed,
        train.steps * train.global_batch,
    )
    losses = []
    for step in range(train.steps):
        samples = range(step * train.global_batch, (step + 1) * train.global_batch)
        rows = order.batch(samples).inputs[0]
        inputs, targets = _batch(case, data, rows)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, train)
        optimizer.zero_grad()
        with bind_samples(model, train.seed, torch.tensor(samples)):
            total, count = own.plain(model(*inputs), targets)
            loss = total / count
            loss.backward()
        gradients = [p.grad for p in nn.Module.parameters(model) if p.grad is not None]
        norm = torch.stack([g.double().abs().square().sum() for g in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.mul_(min(1.0, train.gradient_clip / (float(norm) + 1e-6)))
        optimizer.step()
        for module in noting.values():
            module.apply_sums(*module.pop_sums())
        losses.append(float(loss))
    validation = _validation(case, own, model) if case.validates else None
    return Trained(_tensors(model), losses, validation)


def _batch(case: Case, data, rows):
    *inputs, targets = default_collate([data[int(row)] for row in rows])
    if case.precision == "fp64":
        inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    return inputs, targets


@torch.no_grad()
def _validation(case: Case, own: types.ModuleType, model: nn.Module) -> float:
    """Mean loss over the first samples of the order of validation, of a second data set."""
    model.eval()
    data = own.Data(20)
    order = wrap_user_dataset(
        (_Rows(len(data)), _Rows(len(data))),
        DataSection(validation_fraction=0.0),
        Job.model_validate(case.job()).train.seed,
        1,
    )
    inputs, targets = _batch(case, data, order.validation_batch(range(5)).inputs[0])
    total, count = own.plain(model(*inputs), targets)
    return float(total / count)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    named = dict(nn.Module.named_parameters(model))
    saved = model.state_dict(keep_vars=True)
    named |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: tensor.detach().clone() for name, tensor in named.items()}
