"""A model as the planner sees it: parameters, FLOPs and kept activations, layer by layer.

Analytic for decoders, without torch; for any other module by running it on tensors that have shapes
but no storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wanma.job.forecast import Layer, Workload
from wanma.job.sections import ModelSection
from wanma.models.huggingface_config import decoder_of, read_config
from wanma.models.presets import DecoderDimensions, decoder_dimensions, model_kind

if TYPE_CHECKING:
    from torch import Tensor, nn


def section_workload(
    section: ModelSection,
    *,
    vocabulary: int | None,
    sequence_length: int,
    image_shape: tuple[int, int, int] | None,
    classes: int | None,
) -> Workload | None:
    """The workload of what a `[model]` section describes; arguments as for `model_spec`.

    Returns:
        None for a factory, whose inputs only its user knows: see `module_workload`.

    Raises:
        JobError: as `model_spec`.
    """
    kind = model_kind(section)
    if kind == "custom":
        return None
    if kind == "tokens":
        dimensions = section_dimensions(section, vocabulary)
        if dimensions is None:
            return _measured_huggingface(section, vocabulary, sequence_length)
        return decoder_workload(dimensions, sequence_length)
    import torch

    from wanma.models.presets import vision_dimensions
    from wanma.models.vision import build_vision

    vision = vision_dimensions(section, image_shape, classes)
    with torch.device("meta"):
        images = torch.empty(vision.statistics_group, vision.channels, vision.height, vision.width)
        return module_workload(build_vision(vision), (images,))


def section_dimensions(section: ModelSection, vocabulary: int | None) -> DecoderDimensions | None:
    """Of the decoder that a `[model]` section of kind "tokens" describes; arguments as for `model_spec`.

    Returns:
        None for a Hugging Face model of another architecture than our decoder's.

    Raises:
        JobError: as `model_spec`.
    """
    if section.huggingface is None:
        return decoder_dimensions(section, vocabulary)
    return decoder_of(read_config(section))


def decoder_workload(dimensions: DecoderDimensions, sequence_length: int, causal: bool = True) -> Workload:
    """Of a `Decoder`, by formula.

    FLOPs are matrix products, 2 per multiply-add. Attention counts the half of its scores that a
    causal model needs; `causal=False` counts all of them, as tables with "full attention" do.

    Activations are the tensors that autograd keeps, after Korthikanti et al. 2022 (section 4.1) for
    this architecture. A token keeps in each block, with q = heads · head width, k likewise of the
    key/value heads:

        4 hidden            both normalisations' inputs and outputs
        2 q + 2 k + heads   query, key, value, attention's output and its log-sum-exp; never the scores
        4 feed_forward      gate, SiLU of gate, up, and their product
        2                   both normalisations' scales

    and with dropout the mask of both branches (2 hidden, of one byte each). Full recompute keeps the
    block's input (hidden), selective recompute (`models.costly`) also query, value, attention's output,
    gate and down.

    Args:
        sequence_length: tokens per sample.
    """
    if dimensions.vocabulary is None:
        raise ValueError("a workload needs dimensions with a vocabulary")
    hidden, width, wide = dimensions.hidden, dimensions.head_width, dimensions.feed_forward
    query, key = dimensions.heads * width, dimensions.kv_heads * width
    matrices = hidden * (2 * query + 2 * key) + 3 * hidden * wide
    parameters = matrices + 2 * hidden
    kept = 4 * hidden + 2 * query + 2 * key + dimensions.heads + 4 * wide + 2
    if dimensions.attention_bias:
        parameters += query + 2 * key
    if dimensions.head_norm:
        parameters += 2 * width
        kept += query + key + dimensions.heads + dimensions.kv_heads
    if dimensions.dropout > 0:
        kept += 2 * hidden
    scores = sequence_length * sequence_length * (0.5 if causal else 1.0)
    table = dimensions.vocabulary * hidden
    return Workload(
        layers=(
            Layer("embedding", 1, table, 0.0, 0.0),
            Layer(
                "layers",
                dimensions.layers,
                parameters,
                2.0 * sequence_length * matrices + 4.0 * scores * query,
                float(sequence_length * kept),
                float(sequence_length * hidden),
                float(sequence_length * (2 * query + key + dimensions.heads + wide + hidden)),
            ),
            # Its logits are kept by the loss.
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
    module: nn.Module,
    example_inputs: Sequence[Tensor],
    targets_per_sample: int = 1,
    opened: Sequence[str] = (),
) -> Workload:
    """Of any module, by one forward on tensors that have no storage, per top-level child.

    Lists and dicts of modules count as their children; equal neighbours become one layer with a
    count. What runs outside all of them is a last layer named like the module's class. FLOPs are as
    in `decoder_workload`: attention that says it is causal counts half its scores.

    Args:
        module: on any device, the meta device too; neither run nor changed.
        example_inputs: positional arguments of its forward, dim 0 the samples; only shapes and types count.
        targets_per_sample: of the loss.
        opened: children that count as theirs, though they have a forward.

    Raises:
        WanmaError: the forward fails on such tensors, e.g. because it looks at values.
    """
    from wanma.models.measure import measure

    return Workload(measure(module, example_inputs, opened), targets_per_sample)


def _measured_huggingface(section: ModelSection, vocabulary: int | None, sequence_length: int) -> Workload:
    import torch

    from wanma.models.build import model_spec

    spec = model_spec(
        section, vocabulary=vocabulary, sequence_length=sequence_length, image_shape=None, classes=None
    )
    with torch.device("meta"):
        tokens = torch.zeros(1, sequence_length, dtype=torch.int64)
        model = spec.make()
    blocks = spec.require_layout("model.huggingface").blocks
    assert blocks is not None
    return module_workload(model, (tokens,), sequence_length, opened=(blocks.partition(".")[0],))
