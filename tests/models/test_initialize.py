import math

import pytest
import torch
from torch import nn

from wanma.job.errors import WanmaError
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.structure.parameter_initialization import draw_initial_value, stable_hash

with torch.device("meta"):
    MODEL = Decoder(DecoderConfig(8, 64, 4, 4, 192, 512, attention_bias=True, qk_norm=True))
SHAPES = {name: parameter.shape for name, parameter in MODEL.named_parameters()}


def value(name: str, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return draw_initial_value(MODEL, name, SHAPES[name], dtype, seed)


def test_a_value_depends_on_seed_and_name_alone() -> None:
    name = "layers.3.attention.query.weight"
    first = value(name)
    for other in SHAPES:
        value(other)
    torch.manual_seed(99)
    assert torch.equal(value(name), first)
    assert not torch.equal(value(name, seed=2), first)
    assert not torch.equal(value("layers.4.attention.query.weight"), first)


def test_drawing_leaves_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    value("embedding.weight")
    assert torch.equal(torch.get_rng_state(), before)


def test_other_precisions_start_from_the_fp32_draw() -> None:
    name = "layers.0.feed_forward.up.weight"
    assert torch.equal(value(name, dtype=torch.float64), value(name).double())
    assert torch.equal(value(name, dtype=torch.bfloat16), value(name).bfloat16())


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embedding.weight", 0.02),
        ("head.weight", 0.02),
        ("layers.0.attention.value.weight", 0.02),
        ("layers.7.feed_forward.gate.weight", 0.02),
        ("layers.0.attention.output.weight", 0.02 / math.sqrt(16)),
        ("layers.7.feed_forward.down.weight", 0.02 / math.sqrt(16)),
    ],
)
def test_matrices_are_normal_and_those_that_add_to_the_residual_are_scaled_by_depth(
    name: str, deviation: float
) -> None:
    drawn = value(name)
    assert float(drawn.std()) == pytest.approx(deviation, rel=0.05)
    assert abs(float(drawn.mean())) < 6 * deviation / drawn.numel() ** 0.5


def test_gelu_s_two_matrices_begin_as_those_of_swiglu() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(8, 64, 4, 4, 192, 512, activation_function="gelu"))
    for name in ("layers.7.feed_forward.up.weight", "layers.7.feed_forward.down.weight"):
        shape = model.get_parameter(name).shape
        assert torch.equal(draw_initial_value(model, name, shape, torch.float32, 1), value(name))


def test_norms_begin_at_one_and_biases_at_zero() -> None:
    for name in SHAPES:
        if name.rpartition(".")[0].endswith("norm"):
            assert torch.equal(value(name), torch.ones(SHAPES[name])), name
        if name.endswith("bias"):
            assert torch.equal(value(name), torch.zeros(SHAPES[name])), name


def test_a_model_without_a_rule_is_told_what_to_write() -> None:
    with pytest.raises(WanmaError, match=r"Linear .*weight[\s\S]*initialize_p"):
        draw_initial_value(nn.Linear(2, 2), "weight", (2, 2), torch.float32, 1)


def test_the_hash_is_the_same_in_every_version() -> None:
    assert stable_hash("1:layers.0.attention.query.weight") == 4816767347151862207
    assert 0 <= stable_hash("") < 2**63
