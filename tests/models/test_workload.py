from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from support.flops import attention_on_cpu
from wanma.job.errors import WanmaError
from wanma.job.sections.model import ModelSection
from wanma.models.architectures.decoder import Decoder, decoder_parallel_spec
from wanma.models.architectures.image_classifiers import build_image_classifier
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.presets import OWN_MOE_PRESETS
from wanma.models.config.resolution import resolve_vision_config
from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.models.model_spec import ModelSpec, build_model
from wanma.models.workload.model_workload import (
    build_section_workload,
    compute_decoder_workload,
    trace_module_workload,
)

SHAPES = {
    "plain": DecoderConfig(3, 64, 4, 4, 192, 320),
    "grouped and tied": DecoderConfig(3, 64, 4, 2, 192, 320, tie_embeddings=True),
    "qwen 2.5": DecoderConfig(2, 64, 4, 2, 192, 320, attention_bias=True),
    "qwen 3": DecoderConfig(2, 64, 4, 2, 192, 320, explicit_head_dim=32, qk_norm=True),
    "dropout": DecoderConfig(2, 64, 4, 4, 192, 320, dropout=0.1),
    "gelu": DecoderConfig(2, 64, 4, 4, 256, 320, activation_function="gelu"),
}
MIXTURES = {
    "mixtral": DecoderConfig(3, 64, 4, 2, 192, 320, experts=8, experts_per_token=2),
    "one dense layer": DecoderConfig(
        3,
        64,
        4,
        4,
        192,
        320,
        experts=8,
        experts_per_token=3,
        shared_experts=2,
        expert_feed_forward=96,
        dense_layers=1,
    ),
    "deepseek": OWN_MOE_PRESETS["gpt-moe-3m"],
}


def on_meta(dimensions: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(dimensions)


def initialized(dimensions: DecoderConfig) -> nn.Module:
    return build_model(
        ModelSpec("mine", "tokens", lambda: Decoder(dimensions), decoder_parallel_spec(dimensions), False), 1
    )


@pytest.mark.parametrize("dimensions", {**SHAPES, **MIXTURES}.values(), ids={**SHAPES, **MIXTURES})
def test_parameters_by_formula_equal_those_of_the_model(dimensions: DecoderConfig) -> None:
    counted = sum(parameter.numel() for parameter in on_meta(dimensions).parameters())
    assert compute_decoder_workload(dimensions, 128).parameters == counted


@pytest.mark.parametrize("dimensions", SHAPES.values(), ids=SHAPES)
def test_full_attention_flops_equal_torchs_own_count_on_the_meta_device(
    dimensions: DecoderConfig,
) -> None:
    model, rows = on_meta(dimensions).eval(), 2
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(rows, 128, dtype=torch.int64, device="meta"))
    # On the meta device attention is two whole matrix products: the "full attention" convention.
    by_formula = compute_decoder_workload(dimensions, 128, causal=False).flops_per_sample
    assert by_formula == pytest.approx(3 * counter.get_total_flops() / rows, rel=1e-9)


def test_causal_attention_counts_half_of_the_scores() -> None:
    dimensions, sequence = SHAPES["plain"], 128
    full = compute_decoder_workload(dimensions, sequence, causal=False).flops_per_sample
    causal = compute_decoder_workload(dimensions, sequence).flops_per_sample
    assert full - causal == 3 * dimensions.layers * 2 * sequence**2 * dimensions.hidden


@pytest.mark.parametrize("dimensions", SHAPES.values(), ids=SHAPES)
def test_the_formula_agrees_with_the_measured_decoder(dimensions: DecoderConfig) -> None:
    tokens = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    measured = trace_module_workload(on_meta(dimensions), (tokens,), 128)
    formula = compute_decoder_workload(dimensions, 128)
    assert measured.parameters == formula.parameters
    assert measured.flops_per_sample == pytest.approx(formula.flops_per_sample, rel=1e-9)
    assert measured.tokens_per_sample == formula.tokens_per_sample == 128
    blocks, expected = measured.layers[1], formula.layers[1]
    assert (blocks.name, blocks.count, blocks.parameters) == ("layers", expected.count, expected.parameters)
    # The first block also keeps the rotary factors, which all share.
    assert blocks.activation_elements_per_sample == pytest.approx(
        expected.activation_elements_per_sample, rel=0.03
    )


@pytest.mark.parametrize("dimensions", [SHAPES["grouped and tied"], SHAPES["gelu"], *MIXTURES.values()])
def test_the_formula_agrees_with_what_a_real_forward_keeps(dimensions: DecoderConfig) -> None:
    sequence = 64
    model, kept = initialized(dimensions), {}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(torch.zeros(1, sequence, dtype=torch.int64))
    forecast = sum(
        layer.count * layer.activation_elements_per_sample
        for layer in compute_decoder_workload(dimensions, sequence).layers
    )
    assert sum(kept.values()) + logits.numel() == pytest.approx(forecast, rel=0.03)


@pytest.mark.parametrize("dimensions", MIXTURES.values(), ids=MIXTURES)
def test_the_flops_of_a_mixture_are_those_of_the_experts_that_a_token_passes(
    dimensions: DecoderConfig,
) -> None:
    model, rows = initialized(dimensions), 2
    with FlopCounterMode(display=False, custom_mapping=attention_on_cpu()) as counter:
        model(torch.zeros(rows, 128, dtype=torch.int64))
    by_formula = compute_decoder_workload(dimensions, 128).flops_per_sample
    assert by_formula == pytest.approx(3 * counter.get_total_flops() / rows, rel=1e-9)


def test_a_forecast_of_405_billion_parameters_needs_no_model() -> None:
    workload = build_section_workload(
        ModelSection(preset="llama-3-405b"),
        vocabulary_size=None,
        sequence_length=8192,
        image_shape=None,
        classes=None,
    )
    assert workload is not None
    assert workload.parameters == 405_853_388_800
    # 6 FLOPs per parameter outside the embedding, and attention on top.
    without_attention = 6 * (405_853_388_800 - 128256 * 16384) * 8192
    assert 1.0 < workload.flops_per_sample / without_attention < 1.1


@pytest.mark.parametrize(
    ("preset", "shape", "classes", "parameters", "forward_multiply_adds"),
    [
        # ResNets: torchvision's published parameter and multiply-add counts at 224 × 224.
        ("resnet-18", (3, 224, 224), 1000, 11_689_512, 1.814e9),
        ("resnet-50", (3, 224, 224), 1000, 25_557_032, 4.089e9),
        ("cifar-convnet", (3, 32, 32), 10, 268_650, 1.8855e6),
    ],
)
def test_vision_models_have_their_published_sizes(
    preset: str, shape: tuple[int, int, int], classes: int, parameters: int, forward_multiply_adds: float
) -> None:
    section = (
        ModelSection(preset=preset, batch_norm_group=2) if "res" in preset else ModelSection(preset=preset)
    )
    workload = build_section_workload(
        section, vocabulary_size=None, sequence_length=1, image_shape=shape, classes=classes
    )
    assert workload is not None
    assert workload.parameters == parameters
    assert workload.flops_per_sample / 6 == pytest.approx(forward_multiply_adds, rel=1e-3)
    assert workload.tokens_per_sample == 1


def test_a_factory_has_no_workload_without_example_inputs() -> None:
    section = ModelSection(factory="some:thing")
    assert (
        build_section_workload(
            section, vocabulary_size=None, sequence_length=1, image_shape=None, classes=None
        )
        is None
    )


def test_measuring_a_users_module_leaves_it_as_it_was() -> None:
    dimensions = resolve_vision_config(ModelSection(preset="resnet-18", batch_norm_group=2), (3, 16, 16), 10)
    model = build_image_classifier(dimensions).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace_module_workload(model, (torch.zeros(4, 3, 16, 16),))
    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(int(module.pop_sums()[2]) == 0 for module in find_step_statistics_modules(model).values())
    assert not model._forward_hooks
    assert not model.conv1._forward_hooks


def test_equal_neighbours_become_one_layer_and_the_rest_is_named_like_the_module() -> None:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.out = nn.Linear(8, 2)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return self.out(x * self.scale)

    workload = trace_module_workload(Users(), (torch.zeros(5, 8),))
    assert [(layer.name, layer.count, layer.parameters) for layer in workload.layers] == [
        ("blocks", 3, 72),
        ("out", 1, 18),
        ("Users", 1, 8),
    ]
    assert [layer.flops_per_sample for layer in workload.layers] == [128, 32, 0]


def test_a_forward_that_looks_at_values_is_told_so() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(WanmaError, match=r"Looks[\s\S]*does not depend on values"):
        trace_module_workload(Looks(), (torch.zeros(2, 2),))


def test_adapters_are_all_that_is_trained() -> None:
    size: dict[str, Any] = {
        "vocabulary_size": None,
        "sequence_length": 64,
        "image_shape": None,
        "classes": None,
    }
    section = ModelSection(preset="gpt-1m", vocabulary=320)
    plain = build_section_workload(section, **size)
    adapted = build_section_workload(section.model_copy(update={"lora_rank": 4}), **size)
    assert plain is not None
    assert adapted is not None
    # Four matrices of 128 × 128 in each of four blocks, each with 4 × 128 on either side.
    adapters = 4 * 4 * 2 * 4 * 128
    assert adapted.parameters == plain.parameters + adapters
    assert adapted.trainable_share == pytest.approx(adapters / adapted.parameters)
    assert plain.trainable_share == 1.0
    assert 2 / 3 < adapted.flops_per_sample / plain.flops_per_sample < 0.7  # no gradients of frozen weights
