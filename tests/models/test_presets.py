import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.errors import JobError
from wanma.job.sections.model import ModelSection
from wanma.models.config.presets import DECODER_PRESETS, OWN_PRESETS, VISION_PRESETS
from wanma.models.config.resolution import input_kind, resolve_decoder_config, resolve_vision_config
from wanma.models.workload.model_workload import compute_decoder_workload


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("qwen-2.5-0.5b", 494_032_768),
        ("qwen-2.5-7b", 7_615_616_512),
        ("qwen-2.5-72b", 72_706_203_648),
        ("qwen-3-0.6b", 596_049_920),
        ("qwen-3-8b", 8_190_735_360),
        ("qwen-3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        # Published with 58 · 256 biases that choose experts, and a module of 14B for a second token.
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_a_published_preset_has_the_published_number_of_parameters(preset: str, published: int) -> None:
    assert compute_decoder_workload(DECODER_PRESETS[preset], 1).parameters == published


@pytest.mark.parametrize(
    ("preset", "active"),
    [
        ("mixtral-8x7b", 12.9e9),  # Jiang et al. 2024, section 1
        ("mixtral-8x22b", 39e9),  # Mistral's announcement
        ("deepseek-v3", 37e9),  # DeepSeek-AI 2024, abstract
        ("gpt-moe-3m", 0.9e6),
        ("gpt-moe-43m", 12e6),
        ("gpt-moe-400m", 124e6),
    ],
)
def test_a_token_passes_the_published_part_of_a_mixture(preset: str, active: float) -> None:
    found = compute_decoder_workload(DECODER_PRESETS[preset], 1)
    assert found.active_parameters == pytest.approx(active, rel=0.03)
    if preset.startswith("gpt-moe"):
        named = float(preset.removeprefix("gpt-moe-").removesuffix("m")) * 1e6
        assert found.parameters == pytest.approx(named, rel=0.03)


@pytest.mark.parametrize("preset", OWN_PRESETS)
def test_a_gpt_preset_has_about_the_parameters_of_its_name(preset: str) -> None:
    size = preset.removeprefix("gpt-").removeprefix("3-")
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert compute_decoder_workload(OWN_PRESETS[preset], 1).parameters == pytest.approx(named, rel=0.12)


def test_gpt_3_has_the_parameters_that_it_was_published_with_but_for_biases_and_positions() -> None:
    hidden, layers = 12288, 96
    left_out = layers * (9 * hidden + 4 * hidden - 2 * hidden) + hidden + 2048 * hidden
    padding = (50304 - 50257) * hidden
    found = compute_decoder_workload(OWN_PRESETS["gpt-3-175b"], 2048)
    assert found.parameters - padding + left_out == pytest.approx(174.6e9, rel=1e-4)  # table D.1
    assert found.parameters == pytest.approx(174.6e9, rel=3e-4)
    tokens = 300e9
    flops = found.flops_per_sample / 2048 * tokens
    assert flops == pytest.approx(3.14e23, rel=0.04)  # table D.1, which leaves attention's scores out


def test_gelu_s_width_is_four_times_hidden_and_experts_have_none() -> None:
    section = ModelSection(family="decoder", layers=2, hidden=96, heads=4, activation_function="gelu")
    assert resolve_decoder_config(section, 258).feed_forward == 384
    preset = ModelSection(preset="gpt-3-175b", activation_function="swiglu", feed_forward=64)
    assert resolve_decoder_config(preset, None).feed_forward_matrices == 3
    for keys in ({"preset": "mixtral-8x7b"}, {"preset": "gpt-1m", "experts": 4}):
        with pytest.raises(JobError, match=r"_function = 'gelu' .*experts = \d"):
            resolve_decoder_config(ModelSection(**keys, activation_function="gelu"), None)


def test_gpt_10m_with_bytes_has_a_vocabulary_of_320_and_about_10_million_parameters() -> None:
    dimensions = resolve_decoder_config(ModelSection(preset="gpt-10m"), vocabulary_size=258)
    assert dimensions.vocabulary == 320
    assert compute_decoder_workload(dimensions, 256).parameters == 10_867_584


def test_the_vocabulary_is_the_tokenizers_rounded_up_to_64_and_the_presets_without_one() -> None:
    section = ModelSection(preset="gpt-17m")
    assert resolve_decoder_config(section, 1000).vocabulary == 1024
    assert resolve_decoder_config(section, None).vocabulary == 8192
    assert resolve_decoder_config(ModelSection(preset="gpt-17m", vocabulary=5000), 1000).vocabulary == 5000


def test_a_published_model_keeps_its_vocabulary_if_the_tokenizers_fits() -> None:
    assert resolve_decoder_config(ModelSection(preset="llama-3-8b"), 258).vocabulary == 128256


@pytest.mark.parametrize("section", [{"preset": "gpt-1m", "vocabulary": 100}, {"preset": "llama-2-7b"}])
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_the_one_that_fits(section: dict) -> None:
    with pytest.raises(JobError, match=r"40000[\s\S]*model.vocabulary to 40000"):
        resolve_decoder_config(ModelSection(**section), 40_000)


def test_explicit_keys_override_the_preset() -> None:
    section = ModelSection(
        preset="llama-3-8b", layers=3, rope_theta=7.0, tie_embeddings=True, dropout=0.1, kv_heads=4
    )
    dimensions = resolve_decoder_config(section, None)
    assert (dimensions.layers, dimensions.rope_theta, dimensions.tie_embeddings) == (3, 7.0, True)
    assert (dimensions.dropout, dimensions.kv_heads, dimensions.hidden) == (0.1, 4, 4096)


def test_key_value_heads_follow_the_heads_where_the_preset_has_one_for_each() -> None:
    assert resolve_decoder_config(ModelSection(preset="gpt-10m", heads=4), None).kv_heads == 4
    assert resolve_decoder_config(ModelSection(preset="llama-3-8b", heads=16), None).kv_heads == 8


def test_a_family_needs_only_layers_hidden_and_heads() -> None:
    dimensions = resolve_decoder_config(ModelSection(family="decoder", layers=2, hidden=96, heads=4), 258)
    assert (dimensions.kv_heads, dimensions.feed_forward, dimensions.vocabulary) == (4, 256, 320)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "lama-3-8b"}, "unknown. Did you mean 'llama-3-8b'"),
        ({"preset": "resnet-18"}, "'resnet-18' is not a decoder"),
        ({"preset": "gpt-1m", "depth": 18}, "model.depth does not apply to a decoder"),
        ({"preset": "gpt-1m", "batch_norm_group": 8}, "model.batch_norm_group does not apply"),
        ({"family": "decoder", "layers": 2}, "needs model.hidden, model.heads"),
        ({"preset": "gpt-1m", "hidden": 130}, "130 is not divisible by model.heads = 4"),
        (
            {"preset": "gpt-1m", "kv_heads": 3},
            "model.heads = 4 is not divisible by model.kv_heads = 3.*\n.*1, 2, 4",
        ),
        ({"preset": "gpt-1m", "hidden": 12}, "the odd head dimension 3"),
        ({"family": "decoder", "layers": 2, "hidden": 8, "heads": 2}, "the vocabulary is unknown"),
    ],
)
def test_wrong_dimensions_are_told_with_their_keys(keys: dict, message: str) -> None:
    with pytest.raises(JobError, match=message):
        resolve_decoder_config(ModelSection(**keys), None)


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 16), st.integers(1, 300_000))
def test_what_is_accepted_divides_and_holds_every_token(
    heads: int, width: int, kv_heads: int, tokenizer: int
) -> None:
    section = ModelSection(family="decoder", layers=1, hidden=heads * width, heads=heads, kv_heads=kv_heads)
    try:
        dimensions = resolve_decoder_config(section, tokenizer)
    except JobError:
        assert heads % kv_heads or width % 2
    else:
        assert dimensions.heads % dimensions.kv_heads == 0
        assert dimensions.head_dim % 2 == 0
        assert dimensions.vocabulary is not None
        assert 0 <= dimensions.vocabulary - tokenizer < 64


def test_the_kind_of_a_model_follows_from_its_section() -> None:
    assert input_kind(ModelSection(preset="gpt-1m")) == "tokens"
    assert input_kind(ModelSection(family="resnet", depth=18)) == "images"
    assert input_kind(ModelSection(preset="cifar-convnet")) == "images"
    assert input_kind(ModelSection(factory="a:b")) == "custom"


@pytest.mark.parametrize("preset", VISION_PRESETS)
def test_a_vision_model_takes_its_sizes_from_the_data(preset: str) -> None:
    dimensions = resolve_vision_config(ModelSection(preset=preset, batch_norm_group=16), (1, 28, 30), 10)
    assert (dimensions.channels, dimensions.height, dimensions.width, dimensions.classes) == (1, 28, 30, 10)
    assert dimensions.batch_norm_group == 16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"preset": "resnet-18", "channels": 3}, "model.channels = 3, but the data has 1"),
        ({"preset": "resnet-18", "image_size": 32}, "image_size = 32, but the data has 28"),
        ({"preset": "resnet-18", "classes": 5}, "model.classes = 5, but the data has 10"),
        ({"preset": "resnet-18", "depth": 50}, "contradicts model.preset"),
        ({"preset": "resnet-18", "heads": 2}, "model.heads does not apply"),
        ({"preset": "resnet-18", "activation_function": "gelu"}, "activation_function does not apply"),
        ({"family": "resnet"}, "needs model.depth"),
        ({"family": "convnet", "depth": 18}, "model.depth does not apply"),
        ({"preset": "gpt-1m"}, "'gpt-1m' is not a vision model"),
    ],
)
def test_what_contradicts_the_data_is_refused(keys: dict, message: str) -> None:
    with pytest.raises(JobError, match=message):
        resolve_vision_config(ModelSection(**keys), (1, 28, 28), 10)


def test_without_data_a_vision_model_says_what_it_misses() -> None:
    for known, missing in (({"classes": 10}, "image_size"), ({"image_size": 32}, "number of classes")):
        with pytest.raises(JobError, match=f"{missing} .*is unknown"):
            resolve_vision_config(ModelSection(preset="resnet-18", channels=3, **known), None, None)


def test_presets_and_forecasts_of_decoders_do_not_import_torch() -> None:
    code = "import sys, wanma.models, wanma.models.config.presets, wanma.models.structure.parallel_spec; "
    code += "import wanma.models.workload.model_workload; "
    code += "print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# ------------------------------------------------------------------ experts

DECODER = {"family": "decoder", "layers": 4, "hidden": 64, "heads": 4}


def test_a_decoder_with_experts_gets_defaults_for_the_rest() -> None:
    dimensions = resolve_decoder_config(ModelSection(**DECODER, experts=8), 257)
    assert (dimensions.experts_per_token, dimensions.shared_experts, dimensions.router) == (2, 0, "softmax")
    assert (dimensions.balance, dimensions.balance_rate) == ("bias", 1e-3)
    assert dimensions.expert_width == dimensions.feed_forward
    dimensions = resolve_decoder_config(ModelSection(**DECODER, experts=8, balance="loss"), 257)
    assert (dimensions.balance, dimensions.balance_rate) == ("loss", 1e-2)


def test_a_mixtures_preset_keeps_what_the_section_does_not_say() -> None:
    dimensions = resolve_decoder_config(ModelSection(preset="mixtral-8x7b", experts=16, layers=2), None)
    assert (dimensions.experts, dimensions.experts_per_token, dimensions.layers) == (16, 2, 2)
    assert (dimensions.balance, dimensions.balance_rate) == ("loss", 0.02)
    dimensions = resolve_decoder_config(ModelSection(preset="mixtral-8x7b", balance="none"), None)
    assert (dimensions.balance, dimensions.balance_rate) == ("none", 0.0)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({**DECODER, "experts_per_token": 2}, r"model\.experts_per_token does not apply"),
        ({**DECODER, "capacity_factor": 1.5}, r"model\.capacity_factor does not apply"),
        ({"preset": "gpt-1m", "balance": "bias"}, r"model\.balance does not apply"),
        ({**DECODER, "experts": 4, "experts_per_token": 5}, r"experts_per_token = 5 exceeds the 4"),
        ({**DECODER, "experts": 4, "dense_layers": 4}, r"dense_layers = 4 of model\.layers = 4"),
        ({**DECODER, "experts": 4, "balance_group": 2}, r"balance_group = 2 has no effect"),
        (
            {**DECODER, "experts": 4, "balance": "none", "balance_rate": 0.1},
            r"balance_rate = 0\.1 has",
        ),
        ({"preset": "deepseek-v3", "experts": 100}, r"experts = 100 is not divisible by the 8"),
        ({"preset": "deepseek-v3", "experts": 8, "experts_per_token": 5}, r"exceeds the 4 experts that"),
        ({"preset": "deepseek-v3", "kv_heads": 8}, r"kv_heads = 8 is not supported"),
    ],
    ids=str,
)
def test_keys_for_experts_that_contradict_each_other_are_refused(section: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        resolve_decoder_config(ModelSection(**section), 257)


def test_a_vision_model_has_no_experts() -> None:
    with pytest.raises(JobError, match=r"model\.experts"):
        resolve_vision_config(ModelSection(preset="resnet-18", experts=4), (3, 32, 32), 10)
