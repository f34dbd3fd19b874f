"""Typed sections of the job file, with defaults and one-line help; no behaviour.

`wanma job` prints this file's content. Cross-field rules that need only the job are validators here; rules
that need the nodes or the model belong to the planner.
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
    """Model: a preset, a family with dimensions, a Hugging Face config, or a custom factory."""

    preset: str | None = Field(None, description="named model, e.g. 'gpt-10m', 'llama-3-8b', 'resnet-18'")
    family: Literal["decoder", "convnet", "resnet"] | None = Field(
        None, description="model family, built from the dimensions below"
    )
    factory: str | None = Field(None, description="'package.module:function' returning an nn.Module")
    huggingface: str | None = Field(
        None, description="config.json of a transformers causal model, or the folder that holds it"
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the factory; or keys of the config to replace"
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
        description="decoder: inner width of the feed-forward network; default: 8/3 × hidden, or 4 × with "
        "'gelu'",
    )
    activation_function: Literal["swiglu", "gelu"] | None = Field(
        None,
        description="decoder: feed-forward network of three matrices ('swiglu', default) or of two ('gelu')",
    )
    vocabulary: int | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="decoder: number of tokens; default: the tokenizer's, rounded up to 64",
    )
    rope_theta: float | None = Field(
        None, gt=0, le=1e12, description="decoder: base of the rotary frequencies"
    )
    tie_embeddings: bool | None = Field(
        None, description="decoder: share input and output embeddings (weight tying)"
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="decoder: probability of residual dropout, keyed by sample"
    )
    experts: int | None = Field(
        None, gt=1, le=100_000, description="decoder: routed experts per block; default: none (dense)"
    )
    experts_per_token: int | None = Field(
        None, gt=0, le=100_000, description="decoder: routed experts per token; default: 2"
    )
    shared_experts: int | None = Field(
        None, ge=0, le=100_000, description="decoder: experts that every token uses"
    )
    expert_feed_forward: int | None = Field(
        None, gt=0, le=100_000_000, description="decoder: inner width of one expert; default: feed_forward"
    )
    dense_layers: int | None = Field(
        None, ge=0, le=1_024, description="decoder: number of first blocks without experts"
    )
    router: Literal["softmax", "sigmoid"] | None = Field(
        None, description="decoder: function from router scores to weights; default: softmax"
    )
    balance: Literal["none", "bias", "loss"] | None = Field(
        None,
        description="decoder: load balancing of experts by a bias that follows the load (default), or by "
        "a loss",
    )
    balance_rate: float | None = Field(
        None,
        gt=0,
        le=1_000,
        description="decoder: step of the bias (default: 1e-3), or weight of the loss (default: 1e-2)",
    )
    balance_group: int = Field(
        1,
        gt=0,
        le=1_000_000_000,
        description="decoder: samples over which a balancing loss and the expert capacity are counted",
    )
    capacity_factor: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="decoder: expert capacity in tokens, as a multiple of an even share; 0: no token is "
        "dropped",
    )
    lora_rank: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="inner dimension of low-rank adapters (LoRA), then the only trained parameters; 0: none",
    )
    lora_alpha: float = Field(
        16.0, gt=0, le=1_000_000, description="scale of an adapter's output: lora_alpha / lora_rank"
    )
    lora_targets: list[str] = Field(
        default_factory=lambda: ["*.attention.*", "*.self_attn.*_proj", "*.attn.c_*"],
        min_length=1,
        description="shell patterns on the paths of the linear layers that get an adapter",
    )
    depth: Literal[18, 50] | None = Field(None, description="resnet: number of layers")
    classes: int | None = Field(
        None, gt=1, le=1_000_000_000, description="vision: number of classes; default: the data's"
    )
    channels: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: input channels; default: the data's"
    )
    image_size: int | None = Field(
        None, gt=0, le=1_000_000, description="vision: height and width in pixels; default: the data's"
    )
    batch_norm_group: int = Field(
        32,
        gt=0,
        le=1_000_000_000,
        description="samples that share one batch-normalization statistic, in any layout",
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelSection:
        sources = ("preset", "family", "factory", "huggingface")
        given = [k for k in sources if getattr(self, k) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(sources)} (given: {', '.join(given) or 'none'})"
            )
        return self


class ParameterGroupSection(Section):
    """Parameters, selected by name, with their own learning rate or weight decay, or frozen."""

    match: str = Field(description="shell pattern on the full parameter name, e.g. 'layers.0.*'")
    learning_rate_scale: float = Field(1.0, ge=0, le=1_000_000, description="factor on the learning rate")
    weight_decay: float | None = Field(
        None, ge=0, le=1_000, description="weight decay of these parameters, instead of train.weight_decay"
    )
    frozen: bool = Field(False, description="exclude these parameters from training")
    muon: bool | None = Field(
        None,
        description="with train.optimizer = 'muon': update by Muon (true) or AdamW (false); default: by role",
    )


class TrainSection(Section):
    """Mathematics of the run; no key here may depend on the hardware."""

    steps: int = Field(300, gt=0, le=1_000_000_000_000, description="optimizer steps of the run")
    global_batch: int = Field(32, gt=0, le=1_000_000_000, description="samples per optimizer step")
    batch_ramp: list[tuple[int, int]] = Field(
        default_factory=list,
        description="[[step, global_batch], ...]: batch size in samples from that step on",
    )
    precision: Precision = Field(
        "fp32", description="compute precision; master weights stay fp32 (fp64: for exact comparisons)"
    )
    fp8: bool = Field(
        False,
        description="run the blocks' matrix products in fp8 (torchao; GPUs from compute capability 8.9 on)",
    )
    optimizer: Literal["adamw", "sgd", "adafactor", "muon"] = Field("adamw", description="optimizer")
    optimizer_factory: str | None = Field(
        None,
        description="'package.module:Class' or function of parameter groups, instead of optimizer: "
        "'torch.optim:RAdam'",
    )
    optimizer_arguments: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of optimizer_factory"
    )
    learning_rate: float = Field(1e-3, gt=0, le=1_000, description="peak learning rate")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="decay of the learning rate after warm-up"
    )
    schedule_factory: str | None = Field(
        None,
        description="'package.module:function' (step) or (step, steps) -> share of learning_rate, instead "
        "of schedule",
    )
    warmup_steps: int = Field(
        0, ge=0, le=1_000_000_000_000, description="steps of linear warm-up of the learning rate"
    )
    final_learning_rate_share: float = Field(
        0.1, ge=0, le=1, description="learning rate at the end, as a share of the peak"
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        le=1_000,
        description="weight decay, decoupled (sgd: coupled); not applied to norms and biases",
    )
    betas: tuple[float, float] = Field(
        (0.9, 0.95), description="decay rates of AdamW's first and second moments"
    )
    epsilon: float = Field(1e-8, gt=0, le=1_000, description="term added to AdamW's denominator")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD and Muon")
    parameter_groups: list[ParameterGroupSection] = Field(
        default_factory=list, description="parameter groups; the first match applies"
    )
    weight_average: float = Field(
        0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0: off"
    )
    gradient_clip: float = Field(
        1.0, ge=0, le=1_000_000_000_000, description="maximum global gradient norm; 0: off"
    )
    non_finite: Literal["stop", "skip", "retry"] = Field(
        "stop",
        description="action on a NaN or infinite gradient; skip: no update in this step; retry: "
        "restore the newest in-memory checkpoint and repeat the step, once; then as skip",
    )
    spike: Literal["ignore", "stop", "skip", "retry"] = Field(
        "ignore",
        description="action on a loss or gradient norm far above those of the last 64 steps, as for "
        "non_finite",
    )
    spike_deviations: float = Field(
        10.0,
        gt=0,
        le=1_000_000,
        description="distance of a spike in robust standard deviations (from the median absolute deviation)",
    )
    loss_scale: float = Field(16384.0, gt=0, le=2**60, description="fp16: initial loss scale")
    validate_every_steps: int = Field(
        0, ge=0, le=1_000_000_000_000, description="steps between validations; 0: only at the end"
    )
    validation_samples: int = Field(
        256, gt=0, le=1_000_000_000_000, description="samples per validation, fixed by the seed"
    )
    stop_patience: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="validations without improvement after which the run ends (early stopping); 0: never",
    )
    stop_metric: str = Field("loss", description="stop_patience: name of the validation metric that decides")
    stop_mode: Literal["min", "max"] = Field(
        "min", description="stop_patience: direction in which the metric is better"
    )
    stop_min_delta: float = Field(
        0.0,
        ge=0,
        le=1_000_000_000,
        description="stop_patience: least change of the metric that is an improvement",
    )
    metrics: dict[str, str] = Field(
        default_factory=dict,
        description="validation metrics: name = 'package.module:function' (output, targets) -> value per "
        "sample or target, or (sum, count)",
    )
    seed: int = Field(
        1, ge=0, le=2**63 - 1, description="seed of initialization, data order and every random draw"
    )
    deterministic: bool = Field(False, description="make results bitwise repeatable, at some cost in speed")

    @model_validator(mode="after")
    def _check_ranges(self) -> TrainSection:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1 (given: {list(self.betas)})")
        if any(step < 0 or batch < 1 for step, batch in self.batch_ramp):
            raise ValueError("batch_ramp needs steps of at least 0 and batches of at least 1")
        starts = [step for step, _ in self.batch_ramp]
        if any(later <= earlier for earlier, later in itertools.pairwise(starts)):
            raise ValueError(f"the steps of batch_ramp must rise (given: {starts})")
        if self.stop_patience > 0 and self.validate_every_steps == 0:
            raise ValueError(
                f"stop_patience = {self.stop_patience} needs validations: set validate_every_steps"
            )
        if self.optimizer_factory is not None and "optimizer" in self.model_fields_set:
            raise ValueError("give only one of optimizer and optimizer_factory")
        if self.schedule_factory is not None and "schedule" in self.model_fields_set:
            raise ValueError("give only one of schedule and schedule_factory")
        return self


class ClusterSection(Section):
    """Nodes, devices, rendezvous, timeouts and recovery of the run."""

    engine: Literal["local"] = Field("local", description="launcher of the processes")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="device type; auto: cuda when present")
    file: str | None = Field(
        None,
        description="cluster file, or a line such as '8x8 H100 SXM, 4x100G'; default: the detected hardware",
    )
    nodes: int = Field(
        1,
        ge=1,
        le=1_000_000,
        description="number of nodes; each runs the same command; '2..8': at least 2, at most 8",
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="minimum number of nodes to start or continue with, as in nodes = '2..8'; default: all",
    )
    node_rank: int | None = Field(
        None, ge=0, le=1_000_000, description="rank of this node; default: by topology address, then arrival"
    )
    rendezvous: str | None = Field(None, description="rendezvous address HOST:PORT, on one of the nodes")
    network_interface: str | None = Field(
        None, description="network interface of collectives; default: by route"
    )
    topology_address: str | None = Field(
        None,
        description="network position of this node, outermost first: 'rack-3/switch-1'; near nodes get "
        "adjacent ranks; default: the cluster file's hosts, or Slurm's topology",
    )
    threads_per_rank: int | None = Field(
        None, gt=0, le=4_096, description="CPU threads per rank; default: cores / ranks"
    )
    scratch: str | None = Field(
        None, description="folder on each node for tensors offloaded to disk; default: the run directory's"
    )
    host_allocator: Literal["tuned", "system"] = Field(
        "tuned", description="settings of the host memory allocator in the workers"
    )
    start_timeout_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="timeout in seconds from launch to the first step"
    )
    last_call_timeout_seconds: float = Field(
        30.0,
        ge=0,
        le=31_536_000,
        description="min_nodes: seconds that the start waits for more nodes",
    )
    hang_timeout_seconds: float = Field(
        300.0, ge=0.1, le=31_536_000, description="timeout in seconds from one step to the next"
    )
    max_restarts: int = Field(
        3,
        ge=0,
        le=1_000_000,
        description="maximum restarts after failures without a new step between them; 0: no restart",
    )
    health_check: Literal["auto", "always", "never"] = Field(
        "auto",
        description="check of devices and links before ranks start; auto: on several nodes, or after a "
        "failure",
    )
    straggler_factor: float = Field(
        1.5,
        gt=1,
        le=1_000_000,
        description="straggler threshold: ratio of a rank's work time to the median of its peers",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.1,
        le=31_536_000,
        description="seconds from SIGTERM to SIGKILL; the final checkpoint must finish within them",
    )
    requeue_exit_code: int = Field(
        143,
        ge=1,
        le=255,
        description="exit code after SIGTERM, SIGUSR1 or SIGHUP, for schedulers that requeue by exit code",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_node_range(cls, value: Any) -> Any:
        """Replace nodes = '2..8' by nodes = 8 and min_nodes = 2."""
        nodes = value.get("nodes") if isinstance(value, dict) else None
        if (
            not isinstance(nodes, str)
            or (found := re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", nodes)) is None
        ):
            return value
        return {**value, "min_nodes": int(found[1]), "nodes": int(found[2])}

    @model_validator(mode="after")
    def _check_nodes_and_rendezvous(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise ValueError(
                f"nodes as a range must rise, as '2..8' (given: '{self.min_nodes}..{self.nodes}')"
            )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            raise ValueError(f"node_rank must be 0 to nodes - 1 = {self.nodes - 1} (given: {self.node_rank})")
        if self.rendezvous is not None:
            host, _, port = self.rendezvous.rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError(
                    f"rendezvous must be HOST:PORT, e.g. '10.0.0.1:29500' (given: '{self.rendezvous}')"
                )
        return self


def _expand_auto(value: Any) -> Any:
    return {"auto": True} if value == "auto" else value


class Job(Section):
    """Validated job: all sections of a job file."""

    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    parallel: Annotated[ParallelSection, BeforeValidator(_expand_auto)] = Field(
        default_factory=ParallelSection
    )
    cluster: ClusterSection = Field(default_factory=ClusterSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    observe: ObserveSection = Field(default_factory=ObserveSection)
