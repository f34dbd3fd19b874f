"""What the user writes: one typed section per room, with defaults and one-line help; no behaviour.

`wanma job` prints this file's content. Cross-field rules that need only the job are here as
validators; what needs the machine or the model belongs to the planner.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from wanma.job.sections.base import Section
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.job.sections.data import DataSection
from wanma.job.sections.observe import ObserveSection
from wanma.job.sections.parallel import ParallelSection

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


class ModelSection(Section):
    """Which model: a preset, a family with dimensions, a Hugging Face config, or one's own factory."""

    preset: str | None = Field(None, description="a named model, e.g. 'gpt-10m', 'llama-3-8b', 'resnet-18'")
    family: Literal["decoder", "convnet", "resnet"] | None = Field(None, description="build from dimensions")
    factory: str | None = Field(None, description="'package.module:function' returning an nn.Module")
    huggingface: str | None = Field(
        None, description="config.json of a transformers causal model, or the folder that holds it"
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory; or the config's keys to replace"
    )
    loss: str | None = Field(
        None,
        description="'package.module:function' (output, targets) -> loss per target; default: cross-entropy",
    )
    layers: int | None = Field(None, gt=0, le=1_024, description="decoder: number of blocks")
    hidden: int | None = Field(None, gt=0, le=10_000_000, description="decoder: width of the residual stream")
    heads: int | None = Field(None, gt=0, le=1_000_000, description="decoder: attention heads")
    kv_heads: int | None = Field(
        None, gt=0, le=1_000_000, description="decoder: key/value heads; default: heads"
    )
    feed_forward: int | None = Field(
        None,
        gt=0,
        le=100_000_000,
        description="decoder: inner width of the feed-forward network; default: 8/3 hidden, or 4 with 'gelu'",
    )
    activation_function: Literal["swiglu", "gelu"] | None = Field(
        None,
        description="decoder: 'swiglu' (default), a feed-forward network of three matrices; 'gelu', of two",
    )
    vocabulary: int | None = Field(
        None, gt=0, le=1_000_000_000, description="decoder: default: the tokenizer's, rounded up to 64"
    )
    rope_theta: float | None = Field(
        None, gt=0, le=1e12, description="decoder: base of the rotary frequencies"
    )
    tie_embeddings: bool | None = Field(None, description="decoder: share input and output embeddings")
    dropout: float = Field(0.0, ge=0, lt=1, description="decoder: residual dropout, keyed by sample")
    experts: int | None = Field(
        None, gt=1, le=100_000, description="decoder: routed experts per block; default: dense"
    )
    experts_per_token: int | None = Field(
        None, gt=0, le=100_000, description="decoder: experts per token; default: 2"
    )
    shared_experts: int | None = Field(
        None, ge=0, le=100_000, description="decoder: experts that every token passes"
    )
    expert_feed_forward: int | None = Field(
        None, gt=0, le=100_000_000, description="decoder: inner width of one expert; default: feed_forward"
    )
    dense_layers: int | None = Field(
        None, ge=0, le=1_024, description="decoder: first blocks without experts"
    )
    router: Literal["softmax", "sigmoid"] | None = Field(
        None, description="decoder: how router scores become weights; default: softmax"
    )
    balance: Literal["none", "bias", "loss"] | None = Field(
        None,
        description="decoder: even use of experts by a bias that follows the load (default), or by a loss",
    )
    balance_rate: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="decoder: step of the bias, or weight of the loss; default: 1e-3, 1e-2",
    )
    balance_group: int = Field(
        1,
        gt=0,
        le=1_000_000_000,
        description="decoder: samples over which a balancing loss and capacity count",
    )
    capacity: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="decoder: tokens an expert takes, times an even share; 0: no token dropped",
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="train low-rank adapters of this inner dimension only (LoRA); 0: everything",
    )
    lora_alpha: float = Field(
        16.0, gt=0, le=1_000_000, description="an adapter's output is scaled by lora_alpha / lora_rank"
    )
    lora_targets: list[str] = Field(
        default_factory=lambda: ["*.attention.*", "*.self_attn.*_proj", "*.attn.c_*"],
        min_length=1,
        description="shell patterns on the paths of the linear layers that get an adapter",
    )
    depth: Literal[18, 50] | None = Field(None, description="resnet: 18 or 50")
    classes: int | None = Field(
        None, gt=1, le=1_000_000_000, description="vision: number of classes; default: the data's"
    )
    channels: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: input channels; default: the data's"
    )
    image_size: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: height and width; default: the data's"
    )
    statistics_group: int = Field(
        32,
        gt=0,
        le=1_000_000_000,
        description="samples that share one batch-normalisation statistic, whatever the layout",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        sources = ("preset", "family", "factory", "huggingface")
        given = [k for k in sources if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(sources)} (given: {', '.join(given) or 'none'})"
            )
        return self


class ParameterGroupSection(Section):
    """Parameters whose name matches get their own rate, decay, or are frozen."""

    match: str = Field(description="shell pattern on the full parameter name, e.g. 'layers.0.*'")
    learning_rate_scale: float = Field(1.0, ge=0, le=1_000_000, description="factor on the learning rate")
    weight_decay: float | None = Field(None, ge=0, le=1_000, description="instead of train.weight_decay")
    frozen: bool = Field(False, description="not trained")
    muon: bool | None = Field(
        None, description="with train.optimizer = 'muon': updated by it or by AdamW; unset: by its role"
    )


class TrainSection(Section):
    """The mathematics of the run: nothing here may depend on the machine."""

    steps: int = Field(300, gt=0, le=1_000_000_000_000, description="optimizer steps")
    global_batch: int = Field(32, gt=0, le=1_000_000_000, description="samples per optimizer step")
    batch_ramp: list[tuple[int, int]] = Field(
        default_factory=list, description="[[step, global_batch], ...]: batch size from that step on"
    )
    precision: Precision = Field(
        "fp32", description="compute precision; master weights stay fp32 (fp64: proofs)"
    )
    fp8: bool = Field(
        False, description="the blocks' matrix products in fp8 (torchao; GPUs from compute capability 8.9 on)"
    )
    optimizer: Literal["adamw", "sgd", "adafactor", "muon"] = Field("adamw", description="update rule")
    optimizer_factory: str | None = Field(
        None,
        description="instead: 'package.module:Class' or function of parameter groups: 'torch.optim:RAdam'",
    )
    optimizer_arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of optimizer_factory"
    )
    learning_rate: float = Field(1e-3, gt=0, le=1_000, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="decay after warm-up")
    schedule_factory: str | None = Field(
        None,
        description="instead: 'package.module:function' (step) or (step, steps) -> share of learning_rate",
    )
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000_000, description="linear warm-up")
    final_learning_rate_share: float = Field(
        0.1, ge=0, le=1, description="rate at the end, share of the peak"
    )
    weight_decay: float = Field(
        0.1, ge=0, le=1_000, description="decoupled (sgd: coupled); not of norms and biases"
    )
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moments")
    epsilon: float = Field(1e-8, gt=0, le=1_000, description="AdamW denominator")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD and Muon momentum")
    parameter_groups: list[ParameterGroupSection] = Field(
        default_factory=list, description="first match wins"
    )
    weight_average: float = Field(
        0.0, ge=0, lt=1, description="decay of an averaged copy of the weights; 0: off"
    )
    gradient_clip: float = Field(
        1.0, ge=0, le=1_000_000_000_000, description="maximum global gradient norm; 0: off"
    )
    non_finite: Literal["stop", "skip", "retry"] = Field(
        "stop",
        description="what a NaN or infinite gradient does; skip: leave that step's update out; retry: go "
        "back, make the step again, and leave it out if it comes back",
    )
    spike: Literal["ignore", "stop", "skip", "retry"] = Field(
        "ignore", description="what a loss or gradient norm far above the last 64 steps' does, likewise"
    )
    spike_deviations: float = Field(
        10.0,
        gt=0,
        le=1_000_000,
        description="how far: robust standard deviations (from the median absolute deviation)",
    )
    loss_scale: float = Field(16384.0, gt=0, le=2**60, description="fp16: initial loss scale")
    validate_every_steps: int = Field(0, ge=0, le=1_000_000_000_000, description="0: only at the end")
    validation_samples: int = Field(
        256, gt=0, le=1_000_000_000_000, description="samples per validation, fixed by the seed"
    )
    stop_patience: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="end the run after so many validations without improvement; 0: never",
    )
    stop_metric: str = Field("loss", description="stop_patience: the metric of validation that counts")
    stop_mode: Literal["min", "max"] = Field("min", description="stop_patience: lower or higher is better")
    stop_min_delta: float = Field(
        0.0, ge=0, le=1_000_000_000, description="stop_patience: the least change that is an improvement"
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="of validation: name = 'package.module:function' (output, targets) -> value per sample "
        "or target, or (sum, count)",
    )
    seed: int = Field(
        1, ge=0, le=2**63 - 1, description="of initialisation, data order and every random draw"
    )
    deterministic: bool = Field(False, description="bitwise repeatable, at some cost in speed")

    @model_validator(mode="after")
    def _in_range(self) -> TrainSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1 (given: {list(self.betas)})")
        if any(step < 0 or batch < 1 for step, batch in self.batch_ramp):
            raise ValueError("batch_ramp needs steps of at least 0 and batches of at least 1")
        starts = [step for step, _ in self.batch_ramp]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f"the steps of batch_ramp must rise (given: {starts})")
        if self.stop_patience > 0 and self.validate_every_steps == 0:
            raise ValueError(
                f"stop_patience = {self.stop_patience} needs validations: set validate_every_steps, too"
            )
        if self.optimizer_factory is not None and "optimizer" in self.model_fields_set:
            raise ValueError("give only one of optimizer and optimizer_factory")
        if self.schedule_factory is not None and "schedule" in self.model_fields_set:
            raise ValueError("give only one of schedule and schedule_factory")
        return self


class ClusterSection(Section):
    """Where it runs."""

    engine: Literal["local"] = Field("local", description="what starts the processes")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda when present")
    file: str | None = Field(
        None, description="cluster file, or a line such as '8x8 H100 SXM, 4x100G'; default: what is here"
    )
    nodes: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="machines; each runs the same command; '2..8': at least 2, at most 8",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="fewest machines that the run goes on with, as in nodes = '2..8'; default: all",
    )
    node_rank: int | None = Field(
        None, ge=0, le=1_000_000, description="this machine's number; default: by place, then arrival"
    )
    rendezvous: str | None = Field(None, description="HOST:PORT where the machines meet")
    interface: str | None = Field(None, description="network interface for collectives; default: by route")
    place: str | None = Field(
        None,
        description="where this machine is in the network, outermost first: 'rack-3/switch-1'; near machines "
        "get neighbouring numbers; default: the cluster file's hosts, or Slurm's topology",
    )
    threads_per_rank: int | None = Field(
        None, gt=0, le=4_096, description="CPU threads; default: cores / ranks"
    )
    scratch: str | None = Field(
        None, description="folder on each machine for what is offloaded to disk; default: the run directory's"
    )
    allocator: Literal["tuned", "system"] = Field("tuned", description="host memory settings of the workers")
    start_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="deadline from launch to the first step"
    )
    join_seconds: float = Field(
        30.0,
        ge=0,
        le=31_536_000,
        description="min_nodes: how long the start waits for more machines than those",
    )
    hang_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="deadline from one step to the next"
    )
    retries: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="recoveries from failures without a new step between them; 0: never recover",
    )
    health_check: Literal["auto", "always", "never"] = Field(
        "auto",
        description="of devices and links, before ranks begin; auto: on several nodes, or after a failure",
    )
    slow_factor: float = Field(
        1.5,
        gt=1,
        le=1_000_000,
        description="a rank that takes so many times its peers' time for its own work is told",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.1,
        le=31_536_000,
        description="from SIGTERM to the SIGKILL that follows: what is to be saved is by then",
    )
    requeue_code: int = Field(
        143,
        ge=1,
        le=255,
        description="exit code after SIGTERM, SIGUSR1 or SIGHUP, by which the scheduler requeues",
    )

    @model_validator(mode="before")
    @classmethod
    def _spell_out_nodes(cls, value: Any) -> Any:
        """nodes = '2..8' is nodes = 8 with min_nodes = 2."""
        nodes = value.get("nodes") if isinstance(value, dict) else None
        if (
            not isinstance(nodes, str)
            or (found := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", nodes)) is None
        ):
            return value
        return {**value, "min_nodes": int(found[1]), "nodes": int(found[2])}

    @model_validator(mode="after")
    def _place(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"nodes has the fewest machines first, as '2..8' (given: '{self.min_nodes}..{self.nodes}')"
            )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise ValueError(
                f"node_rank counts from 0 to nodes - 1 = {self.nodes - 1} (given: {self.node_rank})"
            )
        if self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(
                    f"rendezvous is HOST:PORT, e.g. '10.0.0.1:29500' (given: '{self.rendezvous}')"
                )
        return self


def _spell_out_auto(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class Job(Section):
    """What the user wrote, validated."""

    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: Annotated[ParallelSection, BeforeValidator(_spell_out_auto)] = Field(
        default_factory=ParallelSection
    )
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
