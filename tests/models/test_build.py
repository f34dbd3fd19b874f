import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from wanma.job.errors import JobError
from wanma.job.sections.model import ModelSection
from wanma.models.layers.batch_norm import GroupedBatchNorm, find_sample_coupling_modules
from wanma.models.model_spec import ModelSpec, build_model, resolve_model_spec, wrap_module
from wanma.models.structure.parameter_initialization import draw_initial_value

MODULE = """
import torch
from torch import nn

def network(width, depth=1):
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.BatchNorm1d(width))

def a_number():
    return 3

def broken(rate):
    return nn.Sequential(nn.Dropout(rate))

not_callable = 7
"""


@pytest.fixture
def models_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "users_models.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("users_models", None)


def spec(**keys: object) -> ModelSpec:
    sizes = {"vocabulary_size": None, "sequence_length": 8, "image_shape": None, "classes": None}
    for name in sizes:
        sizes[name] = keys.pop(f"data_{name}", sizes[name])
    return resolve_model_spec(ModelSection(**keys), **sizes)


def test_a_decoder_is_made_on_the_meta_device_with_its_layout() -> None:
    made = spec(preset="gpt-1m", data_vocabulary_size=258)
    assert (made.name, made.input_kind, made.has_own_initialization) == ("gpt-1m", "tokens", False)
    with torch.device("meta"):
        model = made.build_module()
    assert model.get_parameter("head.weight").shape == (320, 128)
    assert made.require_parallel_spec("parallel.tp").blocks == "layers"


@pytest.mark.parametrize("tied", [False, True])
def test_a_built_model_holds_each_parameters_initial_value(tied: bool) -> None:
    model = build_model(spec(preset="gpt-1m", tie_embeddings=tied), seed=5, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        expected = draw_initial_value(model, name, parameter.shape, torch.float64, 5)
        assert torch.equal(parameter, expected), name
    assert (model.head.weight is model.embedding.weight) == tied


def test_a_vision_model_is_built_with_whole_running_statistics() -> None:
    model = build_model(spec(preset="resnet-18", data_image_shape=(3, 8, 8), data_classes=10), seed=1)
    assert model.bn1.running_var.tolist() == [1.0] * 64
    assert model.bn1.running_mean.tolist() == [0.0] * 64


def test_a_factory_is_imported_from_the_working_directory_and_given_its_arguments(models_here: Path) -> None:
    made = spec(factory="users_models:network", arguments={"width": 6, "depth": 2}, batch_norm_group=4)
    assert (made.input_kind, made.parallel_spec, made.has_own_initialization) == ("custom", None, True)
    model = build_model(made, seed=1)
    assert [type(module).__name__ for module in model] == ["Linear", "Linear", "GroupedBatchNorm1d"]
    assert find_sample_coupling_modules(model) == []
    assert model[2].group_size == 4


def test_a_factorys_weights_follow_the_seed_and_leave_the_generator_alone(models_here: Path) -> None:
    made = spec(factory="users_models:network", arguments={"width": 6})
    before = torch.get_rng_state()
    first, again, other = (build_model(made, seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"factory": "users_models:netwrok"}, "'netwrok'. Did you mean 'network'"),
        ({"factory": "users_modles:network"}, "module 'users_modles' does not exist"),
        ({"factory": "users_models:not_callable"}, "is a int, not a function or class"),
        ({"factory": "users_models:network"}, "missing a required argument: 'width'"),
        (
            {"factory": "users_models:network", "arguments": {"width": 1, "hight": 2}},
            r"unexpected keyword argument 'hight'[\s\S]*\(width, depth=1\)",
        ),
        ({"factory": "users_models:network", "layers": 2}, "model.layers does not apply to model."),
        ({"preset": "gpt-1m", "arguments": {"a": 1}}, "model.arguments applies only to"),
        ({"preset": "gpt-1m", "data_image_shape": (3, 8, 8)}, "needs tokens, but the data are images"),
        ({"preset": "resnet-18", "data_vocabulary_size": 300}, "needs images, but the data are tokens"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_runs(
    models_here: Path, keys: dict, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        spec(**keys)


def test_a_factory_that_returns_no_module_is_told_so(models_here: Path) -> None:
    with pytest.raises(JobError, match=":a_number' returned int"):
        build_model(spec(factory="users_models:a_number"), seed=1)


def test_a_factory_that_fails_is_told_with_the_user_s_line_and_how_to_see_more(models_here: Path) -> None:
    with pytest.raises(JobError) as raised:
        build_model(spec(factory="users_models:broken", arguments={"rate": 2}), seed=1)
    told = "failed: ValueError: dropout probability has to be between 0 and 1, but got 2"
    line = f"{models_here}/users_models.py:12 in broken: return nn.Sequential(nn.Dropout(rate))"
    assert raised.value.message == f"model.factory = 'users_models:broken' {told}\n    {line}"
    _, *arguments = shlex.split(raised.value.hint.partition("for the full traceback run: ")[2])
    again = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert 'users_models.py", line 12, in broken' in again.stderr


def test_a_module_passed_in_python_is_used_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made = wrap_module(module)
    assert made.build_module() is module
    assert (made.name, made.input_kind, made.has_own_initialization) == ("Sequential", "custom", True)
    assert find_sample_coupling_modules(module) == ["1"]
    assert isinstance(wrap_module(module, batch_norm_group=2).build_module()[1], GroupedBatchNorm)


def test_a_model_without_a_layout_says_what_it_can_still_do() -> None:
    with pytest.raises(JobError, match=r"parallel.tp: Linear [\s\S]*dp_replicate"):
        wrap_module(nn.Linear(2, 2)).require_parallel_spec("parallel.tp")
