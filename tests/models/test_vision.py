import pytest
import torch
from torch import nn

from wanma.job.sections.model import ModelSection
from wanma.models.layers.batch_norm import find_step_statistics_modules
from wanma.models.model_spec import build_model, resolve_model_spec


def build(preset: str, shape: tuple[int, int, int], **keys: object) -> nn.Module:
    section = ModelSection(preset=preset, **keys)
    spec = resolve_model_spec(
        section, vocabulary_size=None, sequence_length=None, image_shape=shape, classes=10
    )
    return build_model(spec, seed=1)


def test_the_cifar_network_is_convolution_16_convolution_32_linear_128_linear_10() -> None:
    model = build("cifar-convnet", (3, 32, 32))
    assert {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith("weight")} == {
        "first.weight": (16, 3, 3, 3),
        "second.weight": (32, 16, 3, 3),
        "hidden.weight": (128, 2048),
        "classifier.weight": (10, 128),
    }
    assert model(torch.randn(5, 3, 32, 32)).shape == (5, 10)
    assert build("cifar-convnet", (1, 28, 28))(torch.randn(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(
    ("preset", "norms"), [("resnet-18", 20), pytest.param("resnet-50", 53, marks=pytest.mark.full)]
)
def test_small_images_get_the_small_stem(preset: str, norms: int) -> None:
    model = build(preset, (3, 32, 32), batch_norm_group=2)
    assert model.conv1.weight.shape == (64, 3, 3, 3)
    assert len(find_step_statistics_modules(model)) == norms
    assert model(torch.randn(4, 3, 32, 32)).shape == (4, 10)


def test_large_images_get_the_stem_made_for_them() -> None:
    model = build("resnet-18", (3, 128, 128), batch_norm_group=1)
    assert model.conv1.weight.shape == (64, 3, 7, 7)
    assert model.layer4(torch.randn(1, 256, 8, 8)).shape == (1, 512, 4, 4)
    assert model(torch.randn(1, 3, 128, 128)).shape == (1, 10)


def test_a_resnets_gradients_do_not_depend_on_micro_batches() -> None:
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    gradients = []
    model = build("resnet-18", (3, 8, 8), batch_norm_group=2).double()
    for rows in (2, 4):
        model.zero_grad()
        for part in images.split(rows):
            model(part).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


def test_convolutions_begin_as_he_et_al_say_norms_at_one_and_biases_at_zero() -> None:
    model = build("resnet-18", (3, 32, 32))
    weight = model.layer3[0].conv2.weight.detach()
    assert float(weight.std()) == pytest.approx((2 / (256 * 9)) ** 0.5, rel=0.02)
    assert model.layer3[0].bn2.weight.tolist() == [1.0] * 256
    assert model.classifier.bias.tolist() == [0.0] * 10
    assert float(model.classifier.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
