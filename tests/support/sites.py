"""Local SGD, DiLoCo and late gradients written out from their papers, in one process and with torch's own
optimizers: what runs with sites are compared with."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.own import Tagger, seeded
from wanma.data.batch import IGNORE_INDEX
from wanma.data.opening import open_dataset
from wanma.job.plan.synchronization import Synchronization
from wanma.job.sections.job import Job

FRAGMENTS = (("embedding.", "blocks.1."), ("blocks.0.", "head."))
"""Fragments of a `Tagger`, two: its four units in turn."""
STREAMING = Synchronization(
    "diloco",
    2,
    4,
    outer_learning_rate=0.7,
    momentum=0.9,
    fragments=2,
    overlap_steps=3,
    overlap_mixing_factor=0.25,
)
"""After step 3 a fragment is under way, and every site is in the middle of its own local steps."""


def job(steps: int, batch: int = 6, **train: Any) -> dict[str, Any]:
    """A small model with blocks, on rows with unlike numbers of targets."""
    return {
        "model": {"factory": "support.own:Tagger"},
        "data": {"factory": "support.own:PartlyLabelled", "validation_fraction": 0.1},
        "train": {
            "steps": steps,
            "global_batch": batch,
            "precision": "fp64",
            "learning_rate": 1e-2,
            "schedule": "constant",
            "gradient_clip": 0.3,
            "deterministic": True,
            "validation_samples": 4,
            **train,
        },
        "checkpoint": {"every_steps": 0},
    }


def model() -> nn.Module:
    made: nn.Module = seeded(Tagger)
    return made


@dataclass
class Site:
    """One site by itself: a model and its optimizer."""

    model: nn.Module
    train: Any
    optimizer: torch.optim.Optimizer = field(init=False)
    targets: int = 0

    def __post_init__(self) -> None:
        matrices = [one for one in self.model.parameters() if one.ndim >= 2]
        others = [one for one in self.model.parameters() if one.ndim < 2]
        decays = [(matrices, self.train.weight_decay), (others, 0.0)]
        groups = [{"params": some, "weight_decay": decay} for some, decay in decays]
        if self.train.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                groups, lr=self.train.learning_rate, momentum=self.train.momentum
            )
        else:
            self.optimizer = torch.optim.AdamW(
                groups, lr=self.train.learning_rate, betas=self.train.betas, eps=self.train.epsilon
            )

    def backward(self, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """Add the gradient of the summed losses; returns the sum and the number of targets."""
        loss = F.cross_entropy(
            self.model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
        loss.backward()
        return float(loss.detach()), int((targets != IGNORE_INDEX).sum())

    def update(self, targets: int) -> None:
        """With the gradient of the mean, clipped."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= targets
        norm = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).norm()
        for parameter in self.model.parameters():
            if parameter.grad is not None and self.train.gradient_clip > 0:
                parameter.grad *= min(1.0, self.train.gradient_clip / (float(norm) + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Reference:
    """Result of a run."""

    losses: list[float]
    weights: dict[str, Tensor]


def rows_of(text: dict[str, Any], step: int, sites: int) -> list[tuple[Tensor, Tensor]]:
    """(inputs, targets) of every site in `step`, counted from 0: contiguous, as even as can be."""
    parsed = Job.model_validate(text)
    data = open_dataset(parsed.data, parsed.train)
    size = parsed.train.global_batch
    batch = data.batch(range(step * size, (step + 1) * size))
    sizes = [size // sites + (site < size % sites) for site in range(sites)]
    return list(zip(batch.inputs[0].split(sizes), batch.targets.split(sizes), strict=True))


def local(
    text: dict[str, Any],
    *,
    every: int,
    sites: int = 2,
    rate: float = 1.0,
    momentum: float = 0.0,
    offsets: dict[tuple[str, ...], int] | None = None,
    late: int = 0,
    mix: float = 0.0,
    together: int = 0,
) -> Reference:
    """Douillard et al. 2023, algorithm 1; Douillard et al. 2025, algorithms 1 and 2.

    Args:
        offsets: of each fragment, named by how its parameters begin, how many steps before a multiple of
            `every` it is synchronized; default: the whole model, at the multiples.
        late: steps between taking the difference and applying it.
        mix: of its own weights, what a site then keeps.
        together: first steps that all take together.
    """
    train = Job.model_validate(text).train
    outer = model().double()
    members = [Site(deepcopy(outer), train) for _ in range(sites)]
    fragments = offsets or {("",): 0}
    weights = {
        starts: [n for n, _ in outer.named_parameters() if n.startswith(starts)] for starts in fragments
    }
    named = dict(outer.named_parameters())
    optimizers = {
        starts: torch.optim.SGD(
            [named[name] for name in names], lr=rate, momentum=momentum, nesterov=momentum > 0
        )
        for starts, names in weights.items()
    }
    counts = {starts: [0] * sites for starts in fragments}
    under_way: list[tuple[int, tuple[str, ...], list[Tensor]]] = []
    losses = []

    def difference(starts: tuple[str, ...]) -> list[Tensor]:
        shares = [count / sum(counts[starts]) for count in counts[starts]]
        counts[starts] = [0] * sites
        theirs = [dict(site.model.named_parameters()) for site in members]
        return [
            sum((share * (named[name] - of[name]) for share, of in zip(shares, theirs, strict=True)), 0.0)
            .detach()
            .clone()  # type: ignore[union-attr]  # a sum of tensors is one
            for name in weights[starts]
        ]

    def take(starts: tuple[str, ...], kept: float) -> None:
        with torch.no_grad():
            for site in members:
                for name, mine in site.model.named_parameters():
                    if name in weights[starts]:
                        mine.copy_(kept * mine + (1 - kept) * named[name])

    def apply(starts: tuple[str, ...], moved: list[Tensor], kept: float) -> None:
        for name, gradient in zip(weights[starts], moved, strict=True):
            named[name].grad = gradient
        optimizers[starts].step()
        take(starts, kept)

    for step in range(train.steps):
        total, targets, is_last = 0.0, [0] * sites, step + 1 == train.steps
        for number, (site, (inputs, wanted)) in enumerate(
            zip(members, rows_of(text, step, sites), strict=True)
        ):
            loss, targets[number] = site.backward(inputs, wanted)
            total += loss
        losses.append(total / sum(targets))
        if step < together:
            for parameters in zip(*(site.model.parameters() for site in members), strict=True):
                summed = torch.stack([p.grad for p in parameters if p.grad is not None]).sum(dim=0)
                for parameter in parameters:
                    parameter.grad = summed.clone()
        for number, site in enumerate(members):
            site.update(sum(targets) if step < together else targets[number])
        if step < together:
            outer.load_state_dict(members[0].model.state_dict())
            continue
        for starts in fragments:
            counts[starts] = [a + b for a, b in zip(counts[starts], targets, strict=True)]
        for entry in [one for one in under_way if is_last or step + 1 >= one[0] + late]:
            under_way.remove(entry)
            apply(entry[1], entry[2], mix)
        for starts, offset in fragments.items():
            if (step + 1 - together + offset) % every == 0:
                moved = difference(starts)
                if late and not is_last:
                    under_way.append((step + 1, starts, moved))
                else:
                    apply(starts, moved, 0.0)
            elif is_last:
                with torch.no_grad():
                    for name, gradient in zip(weights[starts], difference(starts), strict=True):
                        named[name] -= gradient
                take(starts, 0.0)
    return Reference(losses, {f"model.{name}": one.detach() for name, one in named.items()})


def delayed(text: dict[str, Any], *, staleness: int) -> Reference:
    """Data parallel whose gradients are applied `staleness` steps after they were computed."""
    train = Job.model_validate(text).train
    site = Site(model().double(), train)
    waiting: list[tuple[list[Tensor], int]] = []
    losses = []

    def update() -> None:
        gradients, count = waiting.pop(0)
        for parameter, gradient in zip(site.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        site.update(count)

    for step in range(train.steps):
        ((inputs, wanted),) = rows_of(text, step, 1)
        loss, count = site.backward(inputs, wanted)
        losses.append(loss / count)
        gradients = [p.grad.clone() for p in site.model.parameters() if p.grad is not None]
        site.optimizer.zero_grad()
        waiting.append((gradients, count))
        while len(waiting) > (0 if step + 1 == train.steps else staleness):
            update()
    named = site.model.named_parameters()
    return Reference(losses, {f"model.{name}": one.detach() for name, one in named})
