"""Workload of a model for the planner: parameters, FLOPs and saved activations, layer by layer.

By formula for decoders, without torch; for any other module by a run on tensors that have shapes
but no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from wanma.job.forecast.forecast import EmbeddingTable, LayerWorkload, Workload
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import InteractionSizes
from wanma.job.sections.train import ParameterGroupSection, Precision
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.huggingface_config import decoder_config_from_huggingface, read_section_config
from wanma.models.config.resolution import input_kind, resolve_decoder_config
from wanma.models.workload.sublayer_cost import attention_cost, feed_forward_cost

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.models.model_spec import ModelSpec
    from wanma.models.recommender.config import RecommenderConfig


def build_section_workload(
    section: ModelSection,
    *,
    vocabulary_size: int | None,
    sequence_length: int,
    image_shape: tuple[int, int, int] | None,
    classes: int | None,
    interaction_sizes: InteractionSizes | None = None,
    precision: Precision = "fp32",
    parameter_groups: Sequence[ParameterGroupSection] = (),
    table_state: Callable[[int], float] | None = None,
) -> Workload | None:
    """Return the workload of a `[model]` section; arguments as for `resolve_model_spec`.

    Args:
        section: the job's `[model]`.
        vocabulary_size: number of tokens of the tokenizer; None without one.
        sequence_length: tokens per sample.
        image_shape: (channels, height, width); None without images.
        classes: number of classes of labelled data; None without labels.
        interaction_sizes: sizes of an interaction log; None without one.
        precision: precision of a traced model's computation.
        parameter_groups: `train.parameter_groups`, which may freeze parameters.
        table_state: function from the width of an embedding table to the elements of optimizer state of one
            row, where no rank holds the tables alone; None: tables are dense.

    Returns:
        None for a factory, whose inputs only its user knows: see `trace_module_workload`.

    Raises:
        JobError: as `resolve_model_spec`.
    """
    kind = input_kind(section)
    if kind == "custom":
        return None
    dimensions = resolve_section_decoder_config(section, vocabulary_size) if kind == "tokens" else None
    freezes = section.lora_rank > 0 or any(group.frozen for group in parameter_groups)
    if dimensions is not None and not freezes:
        return compute_decoder_workload(dimensions, sequence_length)
    import torch

    from wanma.models.model_spec import resolve_model_spec
    from wanma.models.structure.parameter_roles import is_frozen

    spec = resolve_model_spec(
        section,
        vocabulary_size=vocabulary_size,
        sequence_length=sequence_length,
        image_shape=image_shape,
        classes=classes,
        interaction_sizes=interaction_sizes,
    )

    def frozen(name: str) -> bool:
        return spec.is_frozen(name) or is_frozen(name, parameter_groups)

    if dimensions is not None:
        from wanma.models.workload.frozen_parts import apply_freezing_to_workload

        with torch.device("meta"):
            sizes = {
                name: tuple(parameter.shape) for name, parameter in spec.build_module().named_parameters()
            }
        path = spec.require_parallel_spec("model").blocks
        return apply_freezing_to_workload(
            compute_decoder_workload(dimensions, sequence_length), sizes, path or "", frozen
        )
    if kind == "tokens":
        return _trace_transformers_workload(spec, sequence_length, precision, frozen)
    if kind == "interactions":
        return _trace_recommender(section, interaction_sizes, precision, frozen, table_state)
    from wanma.models.config.resolution import resolve_vision_config

    vision = resolve_vision_config(section, image_shape, classes)
    with torch.device("meta"):
        images = torch.empty(vision.batch_norm_group, vision.channels, vision.height, vision.width)
        return trace_module_workload(
            spec.build_module(), (images,), blocks=(), precision=precision, is_frozen=frozen
        )


def _trace_recommender(
    section: ModelSection,
    sizes: InteractionSizes | None,
    precision: Precision,
    is_frozen: Callable[[str], bool],
    table_state: Callable[[int], float] | None,
) -> Workload:
    from wanma.models.recommender.build import build_recommender, example_features
    from wanma.models.recommender.config import resolve_recommender_config

    config = resolve_recommender_config(section, sizes)
    workload = trace_module_workload(
        partial(build_recommender, config),
        (),
        keywords=example_features(config),
        blocks=(),
        precision=precision,
        is_frozen=is_frozen,
    )
    return workload if table_state is None else _with_shared_tables(workload, config, table_state)


def _with_shared_tables(
    workload: Workload, config: RecommenderConfig, table_state: Callable[[int], float]
) -> Workload:
    """Return the workload of a recommender whose tables no rank holds alone: they are in no layer."""
    import torch

    from wanma.models.recommender.build import build_recommender
    from wanma.models.recommender.embedding_tables import EmbeddingTables

    with torch.device("meta"):
        model = build_recommender(config)
    modules = {path: part for path, part in model.named_modules() if isinstance(part, EmbeddingTables)}
    tables = tuple(
        EmbeddingTable(
            path,
            name,
            rows,
            part.width,
            part.bag_sizes.get(name, 1),
            table_state(part.width),
        )
        for path, part in modules.items()
        for name, rows in part.rows.items()
    )
    layers = []
    for layer in workload.layers:
        operators = tuple(operator for operator in layer.operators if operator.kind != "lookup")
        if layer.name in modules:
            own = [table for table in tables if table.module == layer.name]
            # The vectors of all ids as they arrive, and their sums.
            elements = sum(table.width * (table.ids_per_sample + 1) for table in own)
            layer = replace(layer, parameters=0, trainable_parameters=None)
            layer, operators = replace(layer, activation_elements_per_sample=elements), ()
        layers.append(replace(layer, operators=operators))
    return replace(workload, layers=tuple(layers), tables=tables)


def resolve_section_decoder_config(
    section: ModelSection, vocabulary_size: int | None
) -> DecoderConfig | None:
    """Return the dimensions of the decoder of a `[model]` section of kind "tokens".

    Arguments are as for `resolve_model_spec`.

    Returns:
        None for a Hugging Face model of another architecture than our decoder's.

    Raises:
        JobError: as `resolve_model_spec`.
    """
    if section.huggingface is None:
        return resolve_decoder_config(section, vocabulary_size)
    return decoder_config_from_huggingface(read_section_config(section))


def compute_decoder_workload(config: DecoderConfig, sequence_length: int, causal: bool = True) -> Workload:
    """Return the workload of a `Decoder`, by formula.

    FLOPs are matrix products, 2 per multiply-add. Attention counts the half of its scores that a
    causal model needs; `causal=False` counts all of them, as tables with "full attention" do.

    Activations are the tensors that autograd saves: see `sublayer_cost` for those of a token
    in each sublayer; with dropout there are the masks of both (hidden bytes each: as one hidden of
    16 bits). Full recompute saves a block's input (hidden), selective recompute (`selective_recompute`) also
    attention's output and every second product's.

    Args:
        config: of the decoder.
        sequence_length: tokens per sample.
        causal: if True, count only the scores of earlier tokens.
    """
    if config.vocabulary is None:
        raise ValueError("the workload of a decoder needs a vocabulary")
    hidden = config.hidden
    table = config.vocabulary * hidden
    scores = sequence_length * sequence_length * (0.5 if causal else 1.0)

    def blocks(numbers: range, *, experts: bool) -> LayerWorkload:
        sublayers = (attention_cost(config), feed_forward_cost(config, has_experts=experts))
        saved_elements = sum(sublayer.saved_elements for sublayer in sublayers) + (
            hidden if config.dropout > 0 else 0
        )
        products = [width for sublayer in sublayers for width in sublayer.matmul_widths]
        costly = sum(sublayer.always_saved_elements for sublayer in sublayers) + sum(products[::2])
        name = "layers" if len(numbers) == config.layers else f"layers.{numbers[0]}-{numbers[-1]}"
        return LayerWorkload(
            name,
            len(numbers),
            sum(sublayer.parameters for sublayer in sublayers),
            2.0 * sequence_length * sum(sublayer.multiply_adds for sublayer in sublayers)
            + 2.0 * scores * sum(sublayer.score_multiply_adds for sublayer in sublayers),
            float(sequence_length * saved_elements),
            float(sequence_length * hidden),
            float(sequence_length * costly),
            expert_parameters=sum(sublayer.expert_parameters for sublayer in sublayers),
            inactive_expert_parameters=sum(sublayer.inactive_expert_parameters for sublayer in sublayers),
            is_block=True,
        )

    dense = range(config.dense_layers if config.experts else config.layers)
    sparse = range(len(dense), config.layers)
    return Workload(
        layers=(
            LayerWorkload("embedding", 1, table, 0.0, 0.0),
            *([blocks(dense, experts=False)] if dense else []),
            *([blocks(sparse, experts=True)] if sparse else []),
            # The loss saves its logits.
            LayerWorkload(
                "head",
                1,
                hidden + (0 if config.tie_embeddings else table),
                2.0 * sequence_length * table,
                float(sequence_length * (2 * hidden + 1 + config.vocabulary)),
            ),
        ),
        tokens_per_sample=sequence_length,
    )


def trace_module_workload(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Tensor],
    targets_per_sample: int = 1,
    *,
    keywords: Mapping[str, Tensor] | None = None,
    blocks: Collection[str] | None = None,
    precision: Precision | None = None,
    autocast: bool = False,
    is_frozen: Callable[[str], bool] | None = None,
) -> Workload:
    """Trace the workload of any module by one forward and backward on tensors without storage.

    Its layers are its repeated blocks and the top-level children beside them; lists and dicts of modules
    count as their members; equal neighbours become one layer with a count. Everything outside of them
    is a last layer named like the module's class. FLOPs are as in `compute_decoder_workload`: attention that
    says it is causal counts half its scores. Dropout is counted as wanma's own, which it becomes.

    Args:
        module: on any device, the meta device too; neither run nor changed. Or a function that makes one:
            then nothing it makes takes memory.
        example_inputs: positional arguments of its forward, dim 0 the samples; only shapes and types count.
        targets_per_sample: number of targets of the loss per sample.
        keywords: keyword arguments likewise.
        blocks: names of the repeated blocks; None: found by structure (`find_repeated_blocks`).
        precision: precision of the model's computation, in which elements are counted; None: its own.
        autocast: if True, it computes under autocast, as users' modules do.
        is_frozen: returns True if the job freezes the parameter of a name; None: as `requires_grad` says.

    Raises:
        WanmaError: the forward or backward fails on such tensors, e.g. because it looks at values.
    """
    import torch

    from wanma.models.workload.module_trace import TraceOptions, trace_workload

    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = None if precision is None else dtypes[precision]
    return trace_workload(
        module,
        example_inputs,
        keywords or {},
        targets_per_sample,
        TraceOptions(blocks, dtype, autocast, is_frozen),
    )


def _trace_transformers_workload(
    spec: ModelSpec, sequence_length: int, precision: Precision, frozen: Callable[[str], bool]
) -> Workload:
    import torch

    with torch.device("meta"):
        tokens = torch.zeros(1, sequence_length, dtype=torch.int64)
        model = spec.build_module()
    path = spec.require_parallel_spec("model.huggingface").blocks
    assert path is not None
    names = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
    return trace_module_workload(
        model, (tokens,), sequence_length, blocks=names, precision=precision, is_frozen=frozen
    )
