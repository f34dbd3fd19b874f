"""What the planner sees of a model and what it promises about a plan, as pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from wanma.job.forecast.operators import Operator


@dataclass(frozen=True)
class Layer:
    """One line of a `Workload`: `count` identical layers."""

    name: str
    count: int
    parameters: int
    """Of one layer."""
    flops_per_sample: float
    """Forward multiply-adds × 2 of one layer for one sample; backward is twice that."""
    activation_elements_per_sample: float
    """Elements that one layer keeps for backward, for one sample, without recompute."""
    input_elements_per_sample: float | None = None
    """Of them those that full recompute keeps: the layer's inputs; None where nobody counted."""
    costly_elements_per_sample: float | None = None
    """What selective recompute keeps beside the inputs (`models.costly`); None likewise."""
    expert_parameters: int = 0
    """Of the parameters, those of routed experts, which `ep` spreads."""
    idle_parameters: int = 0
    """Of them, those of experts that a token is not sent to."""
    trained_parameters: float | None = None
    """Of the parameters, those that are trained, by gradients that are not sparse; None: all. The mean over
    the `count` layers, where these differ."""
    unreached: int = 0
    """Of the `count` layers, those that backward does not come to: nothing in them or before them is
    trained."""
    is_block: bool = False
    """One of the model's repeated blocks, also where it is the only one of its kind."""
    operators: tuple[Operator, ...] = ()
    """What one layer runs for one micro-batch, forward and backward; empty where nobody looked. Of decoders,
    whose operators follow from their dimensions, those of adapters."""

    @property
    def reached_share(self) -> float:
        """Of the layers, those that backward comes to."""
        return 1 - self.unreached / self.count

    @property
    def trained_share(self) -> float:
        """Of the parameters, those that are trained; one where there are none."""
        if self.trained_parameters is None or not self.parameters:
            return 1.0
        return self.trained_parameters / self.parameters


@dataclass(frozen=True)
class Workload:
    """The model as the planner sees it."""

    layers: tuple[Layer, ...]
    tokens_per_sample: int
    """Targets of one sample: the sequence length of text, 1 for a labelled image."""
    output_elements_per_sample: float | None = None
    """That the loss is computed from; None where nobody counted."""
    samples_together: int = 1
    """Of one micro-batch, because modules that were read define something over so many (statistics)."""
    input_elements_per_sample: float | None = None
    """Numbers of one sample as it is loaded; None: its tokens."""

    @property
    def parameters(self) -> int:
        return sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Those that a token passes: all but the experts that it is not sent to."""
        return self.parameters - sum(layer.count * layer.idle_parameters for layer in self.layers)

    @property
    def trained_share(self) -> float:
        """Of the parameters, those that are trained."""
        trained = (layer.count * layer.parameters * layer.trained_share for layer in self.layers)
        return sum(trained) / max(self.parameters, 1)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward, without recompute: what MFU counts.

        Backward is a product for the gradient of a layer's input, and one for that of its weights, which
        those that are not trained do without; layers before all that is trained have no backward.
        """
        return sum(
            layer.count * layer.flops_per_sample * (1 + layer.reached_share + layer.trained_share)
            for layer in self.layers
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Workload:
        layers = tuple(
            Layer(**{**layer, "operators": tuple(map(Operator.from_json, layer["operators"]))})
            for layer in value["layers"]
        )
        return cls(**{**value, "layers": layers})


@dataclass(frozen=True)
class StepTime:
    """One optimizer step by kind, in seconds; the kinds add up to `seconds`."""

    seconds: float
    compute: float
    """Of the rank that computes longest, with what runs again."""
    tensor: float = 0.0
    """Exposed communication by axis, of that rank."""
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0
    """Reduction of gradients, and gathers of sharded parameters."""
    moving: float = 0.0
    """Waiting, in forward and backward, for what is kept in the host's memory or on disk."""
    bubble: float = 0.0
    """Waiting for other stages, and for what they send."""
    optimizer: float = 0.0
    loading: float = 0.0
    """Waiting for data."""
    checkpoint: float = 0.0
    """A step's share of what saving costs."""
    uncertainty: float = 0.0
    """Half of the 90 % interval, as a share of `seconds`."""


@dataclass(frozen=True)
class UsefulTime:
    """What of a long run's time is work that counts."""

    share: float
    copying_share: float
    """Waiting for copies of the state in memory; those on disk are part of a step."""
    seconds_between_failures: float
    """The mean."""
    seconds_per_failure: float
    """That one costs: until training goes on, and work that is done again."""

    @property
    def failing_share(self) -> float:
        return 1 - self.share - self.copying_share


@dataclass(frozen=True)
class RunCost:
    """What the whole run takes."""

    seconds: float
    """With what failures and copies of the state take, as `useful` says."""
    energy_joules: float | None
    """At the wall; None where nobody says what the machines draw."""
    price: float | None = None
    """In the cluster file's currency; None where it names no price."""
    useful: UsefulTime | None = None
    """None: `seconds` are of a run in which nothing fails."""


MEMORY_KINDS = MappingProxyType(
    {
        "parameters_bytes": "parameters",
        "gradients_bytes": "gradients",
        "optimizer_bytes": "optimizer state",
        "activations_bytes": "activations",
        "logits_bytes": "logits",
        "buffers_bytes": "communication buffers",
        "fragmentation_bytes": "fragmentation",
        "runtime_bytes": "torch and its libraries",
    }
)
"""Fields of a forecast that add up to its memory, and what plans and reports call them."""


@dataclass(frozen=True)
class PipelineRank:
    """What one rank of a pipeline holds."""

    memory_bytes: int
    tensor_bytes: int
    """As of `Forecast`."""


@dataclass(frozen=True)
class Forecast:
    """What a plan will cost, on its fullest rank."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    runtime_bytes: int = 0
    """Before the first tensor: Python, torch and its libraries; on a GPU CUDA and NCCL."""
    host_bytes: int = 0
    """What waits in the host's memory, not on the device (parallel.offload_*)."""
    snapshots_bytes: int = 0
    """Copies of the state for recovery, likewise (checkpoint.snapshots)."""
    disk_bytes: int = 0
    """What waits on disk."""
    buffers_bytes: int = 0
    """Of communication, beside the gradients' own."""
    fragmentation_bytes: int = 0
    """What the allocator holds and nobody uses."""
    reasons: tuple[str, ...] = ()
    step: StepTime | None = None
    """None where the machine's rates are unknown, or the model cannot be read."""
    samples_per_second: float | None = None
    model_flops_utilisation: float | None = None
    """Model FLOPs without recompute over the devices' peak in the plan's precision."""
    run: RunCost | None = None
    pipeline_ranks: tuple[PipelineRank, ...] = ()
    """All ranks of a pipeline, which hold other stages; empty where every rank holds as much as the fullest,
    and while a search compares plans."""

    @cached_property
    def memory_bytes(self) -> int:
        """On the device."""
        whole: int = sum(getattr(self, kind) for kind in MEMORY_KINDS)
        return whole

    @property
    def tensor_bytes(self) -> int:
        """Of `memory_bytes` what torch allocates: what a recorder counts on a GPU."""
        return self.memory_bytes - self.runtime_bytes - self.fragmentation_bytes

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory_bytes": self.memory_bytes, "tensor_bytes": self.tensor_bytes}
