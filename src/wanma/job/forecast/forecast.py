"""Workload of a model (input of the cost model) and forecast of a plan (its output), as pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from wanma.job.forecast.data_feed import DataFeed, PreparationForecast, SampleLoading, TextPreparation
from wanma.job.forecast.operators import Operator


@dataclass(frozen=True)
class LayerWorkload:
    """Workload of `count` identical layers."""

    name: str
    count: int
    parameters: int
    """Parameters of one layer."""
    flops_per_sample: float
    """Forward FLOPs (multiply-adds × 2) of one layer for one sample; backward takes twice as many."""
    activation_elements_per_sample: float
    """Elements that one layer saves for backward, for one sample, without recompute."""
    full_recompute_elements_per_sample: float | None = None
    """Saved elements under full recompute: the layer's inputs, for one sample; None when not counted."""
    selective_recompute_elements_per_sample: float | None = None
    """Elements that selective recompute saves beside the inputs, for one sample; None when not counted."""
    expert_parameters: int = 0
    """Parameters of routed experts, which `ep` distributes; part of `parameters`."""
    inactive_expert_parameters: int = 0
    """Parameters of experts to which a token is not routed; part of `expert_parameters`."""
    trainable_parameters: float | None = None
    """Parameters that are trained by dense gradients, part of `parameters`; None: all.

    The mean over the `count` layers if they differ."""
    layers_without_backward: int = 0
    """Layers, of `count`, that backward does not reach: nothing in them or before them is trained."""
    is_block: bool = False
    """True if the layers are repeated blocks of the model, also if there is only one of its kind."""
    operators: tuple[Operator, ...] = ()
    """Operators of one layer for one micro-batch, forward and backward; empty when not recorded.

    Decoders derive their operators from their dimensions; theirs are only those of adapters."""

    @property
    def backward_share(self) -> float:
        """Share of the layers that backward reaches, 0 .. 1."""
        return 1 - self.layers_without_backward / self.count

    @property
    def trainable_share(self) -> float:
        """Share of the parameters that are trained, 0 .. 1; 1 if the layer has none."""
        if self.trainable_parameters is None or not self.parameters:
            return 1.0
        return self.trainable_parameters / self.parameters


@dataclass(frozen=True)
class EmbeddingTable:
    """Embedding table of a model that no rank holds alone: data ranks share it, or parameter servers do."""

    module: str
    """Module of the table; tables of one module have rows of one width, and are looked up together."""
    name: str
    rows: int
    width: int
    ids_per_sample: int
    """Usual number of ids of one sample."""
    state_elements_per_row: float
    """Elements of optimizer state of one row."""


@dataclass(frozen=True)
class Workload:
    """Workload of a model, input of the cost model: parameters, FLOPs and saved elements by layer."""

    layers: tuple[LayerWorkload, ...]
    tokens_per_sample: int
    """Targets of one sample: the sequence length of text, 1 for a labelled image."""
    output_elements_per_sample: float | None = None
    """Elements of one sample from which the loss is computed; None when not counted."""
    coupled_samples: int = 1
    """Samples that a micro-batch must hold together for modules with batch statistics."""
    input_elements_per_sample: float | None = None
    """Input elements of one sample as it is loaded; None: its tokens."""
    loading: SampleLoading | None = None
    """Loading cost of a sample in stored files; None: token files, or arrays in memory."""
    preparation: TextPreparation | None = None
    """Preparation of the text; None: no text, or it is not known here."""
    tables: tuple[EmbeddingTable, ...] = ()
    """Embedding tables that no rank holds alone, which are in no layer; empty where tables are dense."""

    @property
    def parameters(self) -> int:
        return self.dense_parameters + sum(table.rows * table.width for table in self.tables)

    @property
    def dense_parameters(self) -> int:
        """Parameters with dense gradients: all but those of `tables`."""
        return sum(layer.count * layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token uses: all except those of experts to which it is not routed."""
        return self.parameters - sum(layer.count * layer.inactive_expert_parameters for layer in self.layers)

    @property
    def trainable_share(self) -> float:
        """Share of the dense parameters that are trained, 0 .. 1."""
        trained = (layer.count * layer.parameters * layer.trainable_share for layer in self.layers)
        return sum(trained) / max(self.dense_parameters, 1)

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward for one sample, without recompute; the basis of MFU.

        Backward computes one product for the gradient of a layer's input, and one for that of its weights,
        which frozen weights omit; layers before all trained ones have no backward.
        """
        return sum(
            layer.count * layer.flops_per_sample * (1 + layer.backward_share + layer.trainable_share)
            for layer in self.layers
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Workload:
        layers = tuple(
            LayerWorkload(**{**layer, "operators": tuple(map(Operator.from_json, layer["operators"]))})
            for layer in value["layers"]
        )
        loading = SampleLoading.from_json(value["loading"]) if value.get("loading") else None
        text = TextPreparation.from_json(value["preparation"]) if value.get("preparation") else None
        tables = tuple(EmbeddingTable(**table) for table in value.get("tables", ()))
        return cls(**{**value, "layers": layers, "loading": loading, "preparation": text, "tables": tables})


@dataclass(frozen=True)
class StepTime:
    """Forecast time of one optimizer step by kind, in seconds; the kinds add up to `seconds`."""

    seconds: float
    compute: float
    """Compute time of the slowest rank, recompute included."""
    tensor: float = 0.0
    """Exposed tensor-parallel communication of that rank; the next two are those of `cp` and `ep`."""
    context: float = 0.0
    expert: float = 0.0
    data: float = 0.0
    """Exposed reduction of gradients and gathering of sharded parameters."""
    moving: float = 0.0
    """Exposed transfers of offloaded tensors from host memory or disk, in forward and backward."""
    bubble: float = 0.0
    """Idle time of pipeline stages, with exposed transfers between them."""
    optimizer: float = 0.0
    loading: float = 0.0
    """Exposed time of data loading."""
    checkpoint: float = 0.0
    """Time of saving checkpoints, per step."""
    uncertainty: float = 0.0
    """Half the width of the 90 % interval, as a share of `seconds`."""


STEP_TIME_KINDS = MappingProxyType(
    {
        "compute": "compute",
        "tensor": "exposed communication (tp)",
        "context": "exposed communication (cp)",
        "expert": "exposed communication (ep)",
        "data": "exposed communication (dp)",
        "moving": "exposed offload transfer",
        "bubble": "pipeline bubble",
        "optimizer": "optimizer",
        "loading": "exposed data loading",
        "checkpoint": "checkpoint saving",
    }
)
"""Fields of a step time that add up to its `seconds`, with their names in plans and reports."""


@dataclass(frozen=True)
class Goodput:
    """Forecast of goodput: share of a long run's time that advances training."""

    share: float
    copying_share: float
    """Share of the time spent on in-memory checkpoints; checkpoints on disk are part of a step."""
    seconds_between_failures: float
    """Mean time between failures."""
    seconds_per_failure: float
    """Mean time lost to one failure: recovery, and work that is repeated."""

    @property
    def failure_share(self) -> float:
        return 1 - self.share - self.copying_share


@dataclass(frozen=True)
class RunCost:
    """Forecast cost of the complete run: time, energy, price."""

    seconds: float
    """Duration of the run, with failures and in-memory checkpoints if `useful` is given."""
    energy_joules: float | None
    """Energy at the wall; None when the nodes' power is unknown."""
    price: float | None = None
    """Price in the cluster file's currency; None if it gives no price."""
    useful: Goodput | None = None
    """Goodput on which `seconds` is based; None: `seconds` assumes that nothing fails."""


@dataclass(frozen=True)
class CheckpointForecast:
    """Forecast of one checkpoint on disk."""

    size_bytes: int
    """Size of the parts of all ranks."""
    stall_seconds: float
    """Time for which training waits: for the copy, and for the write of the checkpoint before."""
    write_seconds: float
    """Time of the write in the background."""


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
"""Fields of a forecast that add up to its memory, with their names in plans and reports."""


@dataclass(frozen=True)
class PipelineRankMemory:
    """Memory of one rank of a pipeline."""

    memory_bytes: int
    tensor_bytes: int
    """Memory that torch allocates, as in `Forecast`."""


@dataclass(frozen=True)
class ServerForecast:
    """Forecast of a plan's parameter servers."""

    count: int
    memory_bytes: int
    """Memory of one server."""
    exchanged_bytes: int
    """Bytes that one worker pulls and pushes in a step."""
    bound: str = ""
    """Part that takes the longest of a step, in words; empty where rates are unknown."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of a plan: memory of its fullest rank, step time, MFU and cost of the run."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    runtime_bytes: int = 0
    """Memory before the first tensor: Python, torch and its libraries; on a GPU CUDA and NCCL."""
    host_bytes: int = 0
    """Offloaded tensors in host memory instead of on the device (parallel.offload_*)."""
    snapshots_bytes: int = 0
    """Host memory of in-memory checkpoints for recovery (checkpoint.in_memory_every_steps)."""
    disk_bytes: int = 0
    """Offloaded tensors on disk."""
    buffers_bytes: int = 0
    """Communication buffers, beside those of the gradients."""
    fragmentation_bytes: int = 0
    """Memory that the allocator reserves and no tensor uses."""
    reasons: tuple[str, ...] = ()
    step: StepTime | None = None
    """Forecast step time; None if the rates of the hardware are unknown, or the model cannot be analyzed."""
    samples_per_second: float | None = None
    model_flops_utilisation: float | None = None
    """Model FLOPs without recompute divided by the devices' peak in the plan's precision, 0 .. 1."""
    run: RunCost | None = None
    data_feed: DataFeed | None = None
    """Forecast of the data feed; None where step time or loading is unknown."""
    preparation: PreparationForecast | None = None
    """Forecast of the text preparation before the first step; None: nothing to prepare, or unknown."""
    pipeline_ranks: tuple[PipelineRankMemory, ...] = ()
    """Memory of each rank of a pipeline, whose stages differ; empty if every rank holds as much as the
    fullest, and while a search compares plans."""
    checkpoint: CheckpointForecast | None = None
    """Forecast of a checkpoint; None where the step time is unknown, and with parameter servers."""
    servers: ServerForecast | None = None
    """Forecast of the parameter servers; None: the job has none. With servers, memory is that of worker 0."""

    @cached_property
    def memory_bytes(self) -> int:
        """Memory on the device, in bytes."""
        total: int = sum(getattr(self, kind) for kind in MEMORY_KINDS)
        return total

    @property
    def tensor_bytes(self) -> int:
        """Part of `memory_bytes` that torch allocates: the memory that a recorder measures on a GPU."""
        return self.memory_bytes - self.runtime_bytes - self.fragmentation_bytes

    def __repr__(self) -> str:
        """Return the three numbers that plans are compared by; `to_json` has all."""
        utilisation = self.model_flops_utilisation
        figures = [
            *(() if self.step is None else (f"{self.step.seconds:.3g} s per step",)),
            f"{self.memory_bytes / 2**30:.3g} GiB per rank",
            *(() if utilisation is None else (f"MFU {utilisation:.1%}",)),
        ]
        return f"<Forecast {', '.join(figures)}>"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "memory_bytes": self.memory_bytes, "tensor_bytes": self.tensor_bytes}
