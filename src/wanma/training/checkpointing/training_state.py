"""Training state of a run: tensors by full name, and a few values as JSON."""

from __future__ import annotations

import base64
from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wanma.data.datasets.stream_reader import StreamReader
from wanma.job.sections.job import TrainSection
from wanma.models.structure.parameter_initialization import stable_hash
from wanma.parallel.parallelize import Parallel
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import Updater
from wanma.training.optimizer.weight_average import WeightAverage
from wanma.training.sites.site_synchronizer import BetweenSites
from wanma.training.step.anomaly_detection import Anomalies
from wanma.training.step.early_stopping import EarlyStopping

COMPRESSION = "compression."
"""Prefix of the names of the tensors that compressed exchanges keep."""


@dataclass
class TrainingState:
    """Mutable state of a run. `samples` alone is its position in the data."""

    parallel: Parallel
    updater: Updater
    scale: LossScale
    average: WeightAverage | None
    step: int = 0
    """Number of completed optimizer steps."""
    samples: int = 0
    """Number of consumed samples."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    anomalies: Anomalies = field(default_factory=Anomalies)
    stopping: EarlyStopping = field(default_factory=EarlyStopping)
    stream: StreamReader | None = None
    """Position in data that can only be iterated over."""
    stream_values: dict[str, Any] = field(default_factory=dict)
    """State of that iteration in the checkpoint that the run began with."""
    sites: BetweenSites | None = None
    """Synchronizer of sites that do not agree at every step; None without sites."""
    share_moves: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Changes of the batch shares by the ranks' times: optimizer steps before each, and the shares."""

    def begin(self, but: Container[str] = ()) -> None:
        """Initialize the weights of a run that restores no checkpoint.

        Args:
            but: names of parameters that the job's own start fills.
        """
        self.parallel.initialize(but)
        if self.parallel.compression is not None:
            self.parallel.compression.rescale(self._gradient_unit())
        self.restart_copies()

    def restart_copies(self) -> None:
        """Reset copies that follow the weights (average, outer weights), after weights alone were filled."""
        if self.average is not None:
            self.average.restart()
        if self.sites is not None:
            self.sites.restart()

    def evaluating(self) -> AbstractContextManager[None]:
        """Make the model compute with averaged weights, or those of all sites, within the context."""
        if self.average is not None:
            return self.average.in_place()
        if self.sites is not None and self.sites.outer is not None:
            return self.sites.outer.in_place()
        return nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers as 'model.NAME'."""
        tensors: dict[str, Tensor] = {}
        self.parallel.rest()  # a user's own evaluation may have left something else in its place
        for part in self.parallel.parts:
            persistent = part.state_dict().keys()
            tensors |= {f"model.{n}": p.detach() for n, p in self._own(dict(part.named_parameters())).items()}
            tensors |= {f"model.{n}": b for n, b in part.named_buffers() if n in persistent}
        return tensors

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state by name; names are the same for every layout."""
        weights = self.weights()
        optimizer: dict[str, Tensor] = {}
        average: dict[str, Tensor] = {}
        for key, of_parameters in self.updater.state_by_kind().items():
            optimizer |= {f"optimizer.{n}.{key}": t for n, t in self._own(of_parameters).items()}
        if self.average is not None:
            average = {f"average.{n}": t for n, t in self._own(self.average.tensors).items()}
        if self.sites is not None:
            return self.sites.named(weights, optimizer, average)
        return weights | optimizer | average | self.kept_of_gradients()

    def kept_of_gradients(self) -> dict[str, Tensor]:
        """Return the tensors that compressed exchanges keep, such as their error feedback."""
        compression = self.parallel.compression
        kept = compression.tensors() if compression is not None else {}
        return {f"{COMPRESSION}{name}": tensor for name, tensor in kept.items()}

    def end_step(self, applied: bool, samples: int) -> None:
        """Count a step after its update; the loss scale may have changed.

        Args:
            applied: true if the weights were updated.
            samples: samples of the step.
        """
        self.step += 1
        self.samples += samples
        if self.parallel.compression is not None:
            self.parallel.compression.end_step(applied=applied, unit=self._gradient_unit())

    def _gradient_unit(self) -> float:
        """Return the ratio of the gradients that ranks exchange to those of the mean loss."""
        return self.parallel.divisor * self.scale.value

    def is_over(self, train: TrainSection) -> bool:
        """Return whether the run has no step left: all are done, or it was stopped early."""
        return self.step >= train.steps or self.stopping.is_over(train)

    def complete_ties(self) -> None:
        """Copy tied tensors from the stage that saves them to the other stage, after a load.

        Every rank calls it.
        """
        ties = self.parallel.ties
        ties.copy_first(dict(self.parallel.named_parameters()))
        for _, of_parameters in sorted(self.updater.state_by_kind().items()):
            ties.copy_first(of_parameters)
        if self.average is not None:
            ties.copy_first(self.average.tensors)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` without tied copies, which another stage saves."""
        copies = self.parallel.ties.names
        return {name: tensor for name, tensor in tensors.items() if name not in copies}

    def values(self) -> dict[str, Any]:
        """Return the values that are no tensors, the same on every rank."""
        return {
            "step": self.step,
            "samples": self.samples,
            "updates": self.updater.updates,
            "loss_scale": self.scale.value,
            "loss_scale_good_steps": self.scale.good_steps,
            "best_loss": self.best_loss,
            "anomalies": self.anomalies.values(),
            "early_stopping": self.stopping.values(),
            **({"stream": self.stream.at(self.samples)} if self.stream is not None else {}),
            **({"gradient_unit": self._gradient_unit()} if self.parallel.compression is not None else {}),
            **({"sites": self.sites.values()} if self.sites is not None else {}),
            "share_moves": [[step, list(shares)] for step, shares in self.share_moves],
        }

    def restore(self, values: dict[str, Any]) -> None:
        self.step = values["step"]
        self.samples = values["samples"]
        self.updater.updates = values["updates"]
        self.scale.value = values["loss_scale"]
        self.scale.good_steps = values["loss_scale_good_steps"]
        self.best_loss = values["best_loss"]
        self.stopping = EarlyStopping.of(values)
        self.stream_values = values.get("stream", {})
        if "anomalies" in values:  # older checkpoints have none
            self.anomalies.restore(values["anomalies"])
        if self.parallel.compression is not None:
            self.parallel.compression.step = self.step
            self.parallel.compression.unit = values.get("gradient_unit", self._gradient_unit())
            self.parallel.compression.rescale(self._gradient_unit())
        if self.sites is not None:
            self.sites.restore(values.get("sites", {}))
        self.share_moves = [(step, tuple(shares)) for step, shares in values.get("share_moves", ())]


def seed_generators(seed: int, rank: int) -> None:
    """Seed this rank's torch generators, for users' code that draws from them: torch seeds them at random."""
    torch.manual_seed(stable_hash(f"{seed}:generators of rank {rank}"))


def random_state() -> dict[str, str]:
    """Return the state of this rank's torch generators.

    wanma's own draws are keyed and need none; users' code may.
    """
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(value.numpy().tobytes()).decode() for name, value in state.items()}


def restore_random_state(state: dict[str, str]) -> None:
    """Restore the state that `random_state` returned; a generator that this process lacks is left alone."""
    tensors = {
        name: torch.frombuffer(bytearray(base64.b64decode(v)), dtype=torch.uint8) for name, v in state.items()
    }
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
