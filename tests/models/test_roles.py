"""Roles follow from the modules that own parameters, whatever their names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.huggingface import FAMILIES
from support.own import Tagger
from support.text import text_spec
from wanma.job.errors import JobError
from wanma.job.sections.train import TrainSection
from wanma.models.model_spec import build_model
from wanma.models.structure.parameter_roles import find_output_layers, find_parameter_roles
from wanma.training.optimizer.named_optimizer import parameter_rules


def matrices(model: nn.Module) -> set[str]:
    return {name for name, role in find_parameter_roles(model).items() if role.is_hidden_matrix}


class Scaled(nn.Module):
    """Parameters of every shape that a norm, bias or table may have."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.shift_bias = nn.Parameter(torch.zeros(4, 8))
        self.places = nn.Parameter(torch.zeros(4, 8))
        self.over_all = nn.LayerNorm((4, 8))
        self.own = GainNorm()
        self.recurrent = nn.GRU(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.out = nn.Linear(8, 1)


class GainNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 8))


def test_decay_leaves_out_norms_of_any_shape_biases_and_single_vectors() -> None:
    decaying = {name for name, role in find_parameter_roles(Scaled()).items() if role.has_weight_decay}
    assert decaying == {
        "words.weight",
        "places",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "out.weight",
    }


def test_hidden_matrices_are_those_of_linear_recurrent_and_attention_layers() -> None:
    roles = find_parameter_roles(Scaled())
    assert matrices(Scaled()) == {
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    }
    assert roles["places"].is_hidden_matrix is None


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.action, self.value = nn.Linear(16, 4), nn.Linear(16, 1)


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.tasks = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 3)})


class Grouped(nn.Module):
    """Attention with fewer keys than queries comes last: no head of it is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Grouped.Layer() for _ in range(2))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("model", "outputs"),
    [
        (Tagger(), {"head"}),
        (Policy(), {"action", "value"}),
        (Tasks(), {"tasks.a", "tasks.b"}),
        (Grouped(), set()),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), {"2"}),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), {"2"}),
        (nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 3, 1)), set()),
        (nn.Linear(8, 8), {""}),
    ],
    ids=["tagger", "policy", "tasks", "grouped", "mlp", "linears", "convolution", "linear"],
)
def test_the_output_layer_is_the_last_linear_one_with_the_heads_beside_it(
    model: nn.Module, outputs: set[str]
) -> None:
    found = {id(layer) for layer in find_output_layers(model)}
    assert {name for name, module in model.named_modules() if id(module) in found} == outputs


def test_what_is_tied_to_a_table_is_no_hidden_matrix() -> None:
    tied = Tagger(tied=True)
    assert "embedding.weight" not in matrices(tied)
    assert matrices(tied) == {"blocks.0.1.weight", "blocks.1.1.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_of_transformers_models_only_the_blocks_have_hidden_matrices(family: str) -> None:
    model = _transformers(family)
    roles = find_parameter_roles(model)
    plain = {
        n for n, r in roles.items() if r.is_hidden_matrix is False and r.is_matrix and r.has_weight_decay
    }
    ends = {"embed_tokens.weight", "lm_head.weight", "wte.weight", "wpe.weight"}
    assert {name.split(".", 1)[-1] if name != "lm_head.weight" else name for name in plain} <= ends
    assert None not in {role.is_hidden_matrix for role in roles.values()}
    blocks = model.get_submodule("transformer.h" if family == "gpt2" else "model.layers")
    owned = {id(p) for p in blocks.parameters() if p.ndim == 2}
    assert {id(model.get_parameter(name)) for name in matrices(model)} == owned


def _transformers(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in FAMILIES[family].items() if key != "model_type"}
    made = transformers.CONFIG_MAPPING[FAMILIES[family]["model_type"]](**config)
    return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize(
    ("section", "tables"),
    [
        ({"family": "decoder", "layers": 2, "hidden": 8, "heads": 2}, {"embedding.weight", "head.weight"}),
        (
            {"family": "decoder", "layers": 2, "hidden": 8, "heads": 2, "tie_embeddings": True},
            {"embedding.weight"},
        ),
    ],
)
def test_of_own_decoders_all_matrices_but_embedding_and_head_are_hidden(
    section: dict[str, Any], tables: set[str]
) -> None:
    spec = text_spec(section, 32, 8)
    model = build_model(spec, 1)
    two_dims: set[str] = {name for name, p in model.named_parameters() if p.ndim == 2}
    assert matrices(model) == two_dims - tables


def test_the_role_of_a_lone_matrix_can_be_said() -> None:
    roles = find_parameter_roles(Scaled())
    with pytest.raises(JobError, match=r"places is a matrix(.|\n)*muon = true"):
        parameter_rules(roles, TrainSection(optimizer="muon"))
    for said in (True, False):
        groups: Any = [{"match": "places", "muon": said}]
        rules = parameter_rules(roles, TrainSection(optimizer="muon", parameter_groups=groups))
        assert rules["places"].is_orthogonalised is said
    wrong = TrainSection(optimizer="muon", parameter_groups=[{"match": "token", "muon": True}])
    with pytest.raises(JobError, match="which is not a matrix"):
        parameter_rules(roles, wrong)


def test_forward_is_not_needed() -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(2, 2)

        def forward(self, _: Tensor) -> Tensor:
            raise AssertionError

    assert matrices(Never()) == set()
