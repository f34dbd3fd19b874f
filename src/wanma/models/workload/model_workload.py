"""Workload of a model for the planner: parameters, FLOPs and saved activations, layer by layer.

By formula for decoders, without torch; for any other module by a run on tensors that have shapes
but no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from wanma.job.forecast.forecast import Layer, Workload
from wanma.job.sections.job import ModelSection, ParameterGroupSection, Precision
from wanma.models.config.dimensions import DecoderDimensions
from wanma.models.config.huggingface_config import decoder_of, read_config
from wanma.models.config.resolution import decoder_dimensions, model_kind
from wanma.models.workload.sublayer_cost import attention_half, feed_forward_half

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wanma.models.model_spec import ModelSpec


def section_workload(
    section: ModelSection,
    *,
    vocabulary: int | None,
    sequence_length: int,
    image_shape: tuple[int, int, int] | None,
    classes: int | None,
    precision: Precision = "fp32",
    groups: Sequence[ParameterGroupSection] = (),
) -> Workload | None:
    """Return the workload of a `[model]` section; arguments as for `model_spec`.

    Args:
        section: the job's `[model]`.
        vocabulary: number of tokens of the tokenizer; None without one.
        sequence_length: tokens per sample.
        image_shape: (channels, height, width); None without images.
        classes: number of classes of labelled data; None without labels.
        precision: precision of a traced model's computation.
        groups: `train.parameter_groups`, which may freeze parameters.

    Returns:
        None for a factory, whose inputs only its user knows: see `module_workload`.

    Raises:
        JobError: as `model_spec`.
    """
    kind = model_kind(section)
    if kind == "custom":
        return None
    dimensions = section_dimensions(section, vocabulary) if kind == "tokens" else None
    freezes = section.lora_rank > 0 or any(group.frozen for group in groups)
    if dimensions is not None and not freezes:
        return decoder_workload(dimensions, sequence_length)
    import torch

    from wanma.models.model_spec import model_spec
    from wanma.models.structure.parameter_roles import is_frozen

    spec = model_spec(
        section,
        vocabulary=vocabulary,
        sequence_length=sequence_length,
        image_shape=image_shape,
        classes=classes,
    )

    def frozen(name: str) -> bool:
        return spec.frozen(name) or is_frozen(name, groups)

    if dimensions is not None:
        from wanma.models.workload.frozen_parts import with_frozen_parts

        with torch.device("meta"):
            sizes = {name: tuple(one.shape) for name, one in spec.make().named_parameters()}
        path = spec.require_layout("model").blocks
        return with_frozen_parts(decoder_workload(dimensions, sequence_length), sizes, path or "", frozen)
    if kind == "tokens":
        return _measured_huggingface(spec, sequence_length, precision, frozen)
    from wanma.models.config.resolution import vision_dimensions

    vision = vision_dimensions(section, image_shape, classes)
    with torch.device("meta"):
        images = torch.empty(vision.batch_norm_group, vision.channels, vision.height, vision.width)
        return module_workload(spec.make(), (images,), blocks=(), precision=precision, frozen=frozen)


def section_dimensions(section: ModelSection, vocabulary: int | None) -> DecoderDimensions | None:
    """Return the dimensions of the decoder of a `[model]` section of kind "tokens".

    Arguments are as for `model_spec`.

    Returns:
        None for a Hugging Face model of another architecture than our decoder's.

    Raises:
        JobError: as `model_spec`.
    """
    if section.huggingface is None:
        return decoder_dimensions(section, vocabulary)
    return decoder_of(read_config(section))


def decoder_workload(dimensions: DecoderDimensions, sequence_length: int, causal: bool = True) -> Workload:
    """Return the workload of a `Decoder`, by formula.

    FLOPs are matrix products, 2 per multiply-add. Attention counts the half of its scores that a
    causal model needs; `causal=False` counts all of them, as tables with "full attention" do.

    Activations are the tensors that autograd saves: see `sublayer_cost` for those of a token
    in each sublayer; with dropout there are the masks of both (hidden bytes each: as one hidden of
    16 bits). Full recompute saves a block's input (hidden), selective recompute (`selective_recompute`) also
    attention's output and every second product's.

    Args:
        dimensions: of the decoder.
        sequence_length: tokens per sample.
        causal: if True, count only the scores of earlier tokens.
    """
    if dimensions.vocabulary is None:
        raise ValueError("a workload needs dimensions with a vocabulary")
    hidden = dimensions.hidden
    table = dimensions.vocabulary * hidden
    scores = sequence_length * sequence_length * (0.5 if causal else 1.0)

    def blocks(numbers: range, *, experts: bool) -> Layer:
        halves = (attention_half(dimensions), feed_forward_half(dimensions, experts=experts))
        kept = sum(half.kept for half in halves) + (hidden if dimensions.dropout > 0 else 0)
        products = [width for half in halves for width in half.products]
        costly = sum(half.always for half in halves) + sum(products[::2])
        name = "layers" if len(numbers) == dimensions.layers else f"layers.{numbers[0]}-{numbers[-1]}"
        return Layer(
            name,
            len(numbers),
            sum(half.parameters for half in halves),
            2.0 * sequence_length * sum(half.multiply_adds for half in halves)
            + 2.0 * scores * sum(half.score_width for half in halves),
            float(sequence_length * kept),
            float(sequence_length * hidden),
            float(sequence_length * costly),
            expert_parameters=sum(half.experts for half in halves),
            idle_parameters=sum(half.idle for half in halves),
            is_block=True,
        )

    dense = range(dimensions.dense_layers if dimensions.experts else dimensions.layers)
    sparse = range(len(dense), dimensions.layers)
    return Workload(
        layers=(
            Layer("embedding", 1, table, 0.0, 0.0),
            *([blocks(dense, experts=False)] if dense else []),
            *([blocks(sparse, experts=True)] if sparse else []),
            # The loss saves its logits.
            Layer(
                "head",
                1,
                hidden + (0 if dimensions.tie_embeddings else table),
                2.0 * sequence_length * table,
                float(sequence_length * (2 * hidden + 1 + dimensions.vocabulary)),
            ),
        ),
        tokens_per_sample=sequence_length,
    )


def module_workload(
    module: nn.Module | Callable[[], nn.Module],
    example_inputs: Sequence[Tensor],
    targets_per_sample: int = 1,
    *,
    keywords: Mapping[str, Tensor] | None = None,
    blocks: Collection[str] | None = None,
    precision: Precision | None = None,
    autocast: bool = False,
    frozen: Callable[[str], bool] | None = None,
) -> Workload:
    """Trace the workload of any module by one forward and backward on tensors without storage.

    Its layers are its repeated blocks and the top-level children beside them; lists and dicts of modules
    count as their members; equal neighbours become one layer with a count. Everything outside of them
    is a last layer named like the module's class. FLOPs are as in `decoder_workload`: attention that says
    it is causal counts half its scores. Dropout is counted as wanma's own, which it becomes.

    Args:
        module: on any device, the meta device too; neither run nor changed. Or a function that makes one:
            then nothing it makes takes memory.
        example_inputs: positional arguments of its forward, dim 0 the samples; only shapes and types count.
        targets_per_sample: number of targets of the loss per sample.
        keywords: keyword arguments likewise.
        blocks: names of the repeated blocks; None: found by structure (`repeated_blocks`).
        precision: precision of the model's computation, in which elements are counted; None: its own.
        autocast: if True, it computes under autocast, as users' modules do.
        frozen: returns True if the job freezes the parameter of a name; None: as `requires_grad` says.

    Raises:
        WanmaError: the forward or backward fails on such tensors, e.g. because it looks at values.
    """
    import torch

    from wanma.models.workload.module_trace import Reading, measure

    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = None if precision is None else dtypes[precision]
    return measure(
        module, example_inputs, keywords or {}, targets_per_sample, Reading(blocks, dtype, autocast, frozen)
    )


def _measured_huggingface(
    spec: ModelSpec, sequence_length: int, precision: Precision, frozen: Callable[[str], bool]
) -> Workload:
    import torch

    with torch.device("meta"):
        tokens = torch.zeros(1, sequence_length, dtype=torch.int64)
        model = spec.make()
    path = spec.require_layout("model.huggingface").blocks
    assert path is not None
    names = [f"{path}.{name}" for name, _ in model.get_submodule(path).named_children()]
    return module_workload(
        model, (tokens,), sequence_length, blocks=names, precision=precision, frozen=frozen
    )
