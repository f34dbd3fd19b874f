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
from wanma.data.interactions.admitted_ids import TABLE_IDS
from wanma.job.sections.train import TrainSection
from wanma.models.structure.parameter_initialization import stable_hash
from wanma.parallel.parallelize import ParallelModel
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import NamedOptimizer
from wanma.training.optimizer.weight_average import WeightAverage
from wanma.training.sites.site_synchronizer import SiteSynchronizer
from wanma.training.step.anomaly_detection import AnomalyDetector
from wanma.training.step.early_stopping import EarlyStopping

COMPRESSION_PREFIX = "compression."
"""Prefix of the names of the tensors that compressed exchanges keep."""


@dataclass
class TrainingState:
    """Mutable state of a run. `samples` alone is its position in the data."""

    parallel_model: ParallelModel
    named_optimizer: NamedOptimizer
    loss_scale: LossScale
    weight_average: WeightAverage | None
    step: int = 0
    """Number of completed optimizer steps."""
    samples: int = 0
    """Number of consumed samples."""
    best_loss: float | None = None
    """Lowest validation loss so far."""
    anomaly_detector: AnomalyDetector = field(default_factory=AnomalyDetector)
    early_stopping: EarlyStopping = field(default_factory=EarlyStopping)
    stream_reader: StreamReader | None = None
    """Position in data that can only be iterated over."""
    stream_values: dict[str, Any] = field(default_factory=dict)
    """State of that iteration in the checkpoint that the run began with."""
    site_synchronizer: SiteSynchronizer | None = None
    """Synchronizer of sites that do not agree at every step; None without sites."""
    table_ids: Mapping[str, Tensor] = field(default_factory=dict)
    """Ids of the rows of embedding tables, by table; a run does not change them."""
    share_changes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Changes of the batch shares by the ranks' times: optimizer steps before each, and the shares."""

    def initialize(self, exclude: Container[str] = ()) -> None:
        """Initialize the weights of a run that restores no checkpoint.

        Args:
            exclude: names of parameters that the job's own start fills.
        """
        self.parallel_model.initialize_parameters(exclude)
        if self.parallel_model.compression is not None:
            self.parallel_model.compression.rescale(self._gradient_scale())
        self.reset_weight_copies()

    def reset_weight_copies(self) -> None:
        """Reset copies that follow the weights (average, outer weights), after weights alone were filled."""
        if self.weight_average is not None:
            self.weight_average.reset()
        if self.site_synchronizer is not None:
            self.site_synchronizer.reset_to_weights()

    def use_evaluation_weights(self) -> AbstractContextManager[None]:
        """Make the model compute with averaged weights, or those of all sites, within the context."""
        if self.weight_average is not None:
            return self.weight_average.use_average()
        if self.site_synchronizer is not None and self.site_synchronizer.outer_optimizer is not None:
            return self.site_synchronizer.outer_optimizer.use_outer_weights()
        return nullcontext()

    def weight_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and persistent buffers as 'model.NAME'."""
        tensors: dict[str, Tensor] = {}
        self.parallel_model.reshard()  # a user's own evaluation may have left something else in its place
        for embedding in self.parallel_model.embeddings:
            embedding.write_back()
        for part in self.parallel_model.model_parts:
            persistent = part.state_dict().keys()
            tensors |= {
                f"model.{n}": p.detach()
                for n, p in self._without_tied_copies(dict(part.named_parameters())).items()
            }
            tensors |= {f"model.{n}": b for n, b in part.named_buffers() if n in persistent}
        return tensors

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the state by name; names are the same for every layout."""
        weights = self.weight_tensors()
        optimizer: dict[str, Tensor] = {}
        average: dict[str, Tensor] = {}
        for key, state_by_name in self.named_optimizer.state_by_kind().items():
            optimizer |= {
                f"optimizer.{n}.{key}": t for n, t in self._without_tied_copies(state_by_name).items()
            }
        if self.weight_average is not None:
            average = {
                f"average.{n}": t for n, t in self._without_tied_copies(self.weight_average.tensors).items()
            }
        ids = {f"{TABLE_IDS}{name}": tensor for name, tensor in self.table_ids.items()}
        if self.site_synchronizer is not None:
            return self.site_synchronizer.checkpoint_tensors(weights, optimizer, average) | ids
        return weights | optimizer | average | self.error_feedback_tensors() | ids

    def changed_rows(self) -> dict[str, Tensor]:
        """Return the rows changed since the last full save, of tensors of which a step changes some alone.

        Returns:
            whether each has, (local rows,) bool, by name as in `checkpoint_tensors`.
        """
        ids = self.table_ids.items()
        changed = {f"{TABLE_IDS}{name}": torch.zeros(len(one), dtype=torch.bool) for name, one in ids}
        for optimizer in self.named_optimizer.table_optimizers:
            rows = optimizer.changed_rows()
            changed |= {f"model.{name}": is_changed for name, is_changed in rows.items()}
            changed |= {f"optimizer.{name}.{key}": rows[name] for name, key, _ in optimizer.state_entries()}
        return changed

    def error_feedback_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that compressed exchanges keep, such as their error feedback."""
        compression = self.parallel_model.compression
        tensors = compression.state_tensors() if compression is not None else {}
        return {f"{COMPRESSION_PREFIX}{name}": tensor for name, tensor in tensors.items()}

    def end_step(self, applied: bool, samples: int) -> None:
        """Count a step after its update; the loss scale may have changed.

        Args:
            applied: true if the weights were updated.
            samples: samples of the step.
        """
        self.step += 1
        self.samples += samples
        if self.parallel_model.compression is not None:
            self.parallel_model.compression.end_step(applied=applied, gradient_scale=self._gradient_scale())

    def _gradient_scale(self) -> float:
        """Return the ratio of the gradients that ranks exchange to those of the mean loss."""
        return self.parallel_model.gradient_divisor * self.loss_scale.value

    def is_over(self, train: TrainSection) -> bool:
        """Return whether the run has no step left: all are done, or it was stopped early."""
        return self.step >= train.steps or self.early_stopping.is_over(train)

    def broadcast_tied_weights(self) -> None:
        """Copy tied tensors from the stage that saves them to the other stage, after a load.

        Every rank calls it.
        """
        ties = self.parallel_model.tied_weights
        ties.broadcast_values(dict(self.parallel_model.named_parameters()))
        for _, state_by_name in sorted(self.named_optimizer.state_by_kind().items()):
            ties.broadcast_values(state_by_name)
        if self.weight_average is not None:
            ties.broadcast_values(self.weight_average.tensors)

    def _without_tied_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` without tied copies, which another stage saves."""
        copies = self.parallel_model.tied_weights.saved_names
        return {name: tensor for name, tensor in tensors.items() if name not in copies}

    def state_values(self) -> dict[str, Any]:
        """Return the values that are no tensors, the same on every rank."""
        attributes = self.named_optimizer.attribute_state()
        return {
            "step": self.step,
            "samples": self.samples,
            "updates": self.named_optimizer.update_count,
            "loss_scale": self.loss_scale.value,
            "loss_scale_good_steps": self.loss_scale.good_steps,
            "best_loss": self.best_loss,
            **({"optimizer_attributes": attributes} if any(attributes) else {}),
            "anomalies": self.anomaly_detector.state_values(),
            "early_stopping": self.early_stopping.state_values(),
            **(
                {"stream": self.stream_reader.state_at(self.samples)}
                if self.stream_reader is not None
                else {}
            ),
            **(
                {"gradient_unit": self._gradient_scale()}
                if self.parallel_model.compression is not None
                else {}
            ),
            **(
                {"sites": self.site_synchronizer.state_values()} if self.site_synchronizer is not None else {}
            ),
            "share_moves": [[step, list(shares)] for step, shares in self.share_changes],
        }

    def restore_values(self, values: dict[str, Any]) -> None:
        self.step = values["step"]
        self.samples = values["samples"]
        self.named_optimizer.update_count = values["updates"]
        self.named_optimizer.restore_attribute_state(values.get("optimizer_attributes", ()))
        self.loss_scale.value = values["loss_scale"]
        self.loss_scale.good_steps = values["loss_scale_good_steps"]
        self.best_loss = values["best_loss"]
        self.early_stopping = EarlyStopping.from_state_values(values)
        self.stream_values = values.get("stream", {})
        if "anomalies" in values:  # older checkpoints have none
            self.anomaly_detector.restore_values(values["anomalies"])
        if self.parallel_model.compression is not None:
            self.parallel_model.compression.step = self.step
            self.parallel_model.compression.gradient_scale = values.get(
                "gradient_unit", self._gradient_scale()
            )
            self.parallel_model.compression.rescale(self._gradient_scale())
        if self.site_synchronizer is not None:
            self.site_synchronizer.restore_values(values.get("sites", {}))
        self.share_changes = [(step, tuple(shares)) for step, shares in values.get("share_moves", ())]


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
