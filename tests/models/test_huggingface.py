"""Models of transformers as wanma sees a decoder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.huggingface import FAMILIES, skip_if_refused, write_config
from support.text import text_spec
from support.tiny_config import tiny_config
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.model import ModelSection
from wanma.models.huggingface.causal_model import CausalTransformersModel
from wanma.models.keyed_random.dropout import bind_samples, replace_dropout
from wanma.models.model_spec import ModelSpec, build_model, resolve_model_spec
from wanma.models.state_dict.tensor_mapping import select_mapping, tensor_shapes
from wanma.models.workload.model_workload import build_section_workload, resolve_section_decoder_config


def spec(folder: Path, vocabulary: int | None = 257, length: int = 16, **arguments: Any) -> ModelSpec:
    section = ModelSection(huggingface=str(folder), arguments=arguments)
    return text_spec(section, vocabulary, length)


def adapted(folder: Path, **arguments: Any) -> CausalTransformersModel:
    model = build_model(spec(folder, **arguments), seed=1)
    assert isinstance(model, CausalTransformersModel)
    return model.eval()


def config_file(folder: Path, config: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def theirs(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def as_published(model: CausalTransformersModel, names: Mapping[str, object]) -> dict[str, Tensor]:
    """The parameters under those of their published names that are in `names`."""
    chosen = {}
    for name, parameter in model.named_parameters():
        pieces = select_mapping(model.tensor_mappings(name, tuple(parameter.shape)), names)
        assert pieces is not None, name
        chosen[name] = pieces, parameter
    tensors = {n: torch.empty(s) for n, s in tensor_shapes(w for w, _ in chosen.values()).items()}
    for pieces, parameter in chosen.values():
        for piece in pieces:
            ends = (at + size for at, size in zip(piece.offset, piece.tensor_shape, strict=True))
            part = parameter.detach()[piece.first_row : piece.first_row + piece.shape[0]]
            tensors[piece.tensor_name][tuple(map(slice, piece.offset, ends))] = piece.to_huggingface(part)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, family)
    ours, original = adapted(folder), theirs(folder)
    state = original.state_dict()
    missing, unexpected = original.load_state_dict(as_published(ours, state), strict=False)
    assert unexpected == []
    assert missing == [other for _, other in ours.parallel_spec.tied_parameters]
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = original(tokens).logits
        assert torch.allclose(ours(tokens), expected, atol=2e-6, rtol=1e-5)
        late = torch.arange(5, 21).expand(2, -1)
        moved = original(tokens, position_ids=late).logits
        assert torch.allclose(ours(tokens, positions=late), moved, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_stays_within_a_document(family: str, tmp_path: Path) -> None:
    model = adapted(write_config(tmp_path, family))
    tokens = torch.randint(0, 257, (1, 12), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    with torch.no_grad():
        together = model(tokens, documents=documents, positions=positions)
        apart = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], dim=1)
    assert torch.allclose(together, apart, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_begin_as_transformers_begins_them(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, family)
    original = theirs(folder).state_dict()
    for name, tensor in as_published(adapted(folder), original).items():
        like = original[name]
        if like.std() == 0 or like.numel() == 1:
            assert torch.equal(tensor, like), name
        else:
            chance = 5 / like.numel() ** 0.5  # five times what two draws of so many numbers differ by
            assert float(tensor.std()) == pytest.approx(float(like.std()), rel=chance), name
            assert abs(float(tensor.mean())) < chance * float(like.std()), name


REFUSED = {
    "attention's weights are dropped": ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop = 0.1"),
    "so in other families": ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    "a window": (
        "mistral",
        {"sliding_window": 8},
        "sliding_window = 8, but .* the whole sequence of 16 tokens",
    ),
    "a balancing loss": ("mixtral", {"output_router_logits": True}, "output_router_logits"),
    "noise": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
    "angles that follow the batch": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        'rope_parameters = "dynamic"',
    ),
    "positions that were never learned": (
        "gpt2",
        {"n_positions": 8},
        "the model has position embeddings for only 8 tokens",
    ),
    "a small vocabulary": ("llama", {"vocab_size": 128}, "vocabulary of 128 is smaller than .* 257"),
    "other experts": ("mixtral", {"hidden_act": "gelu"}, "routed experts"),
    "a family that nobody knows": ("llama", {"model_type": "lama"}, "model_type 'lama' is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    family, changed, told = REFUSED[name]
    with pytest.raises(JobError, match=told):
        spec(write_config(tmp_path, family, **changed))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"model_type": "llama", "auto_map": {"AutoModel": "x.py"}},
            "requires custom code",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantized weights"),
        ({"hidden_size": 3}, "model_type is missing"),
        ([], "model_type is missing"),
    ],
)
def test_files_that_are_no_config_of_a_trainable_model_are_refused(
    content: Any, told: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(JobError, match=told):
        spec(tmp_path)


def test_a_name_on_a_hub_is_not_looked_up() -> None:
    with pytest.raises(JobError, match="is neither a file nor a folder") as raised:
        spec(Path("meta-llama/Llama-3.1-8B"))
    assert "wanma does not download models" in raised.value.hint


def test_arguments_take_the_place_of_the_configs_keys(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "mistral", sliding_window=8)
    model = adapted(folder, sliding_window="null", num_hidden_layers=1, hidden_size=64)
    assert model.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (64, 64)
    assert len(model.get_submodule("model.layers")) == 1
    with pytest.raises(JobError, match=r"model\.layers"):
        resolve_model_spec(
            ModelSection(huggingface=str(folder), layers=3),
            vocabulary_size=None,
            sequence_length=8,
            image_shape=None,
            classes=None,
        )


def test_its_absence_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(WanmaError) as raised:
        spec(write_config(tmp_path, "llama"))
    assert raised.value.hint == "pip install 'wanma[huggingface]'"


def test_dropout_is_keyed_by_sample(tmp_path: Path) -> None:
    model = adapted(write_config(tmp_path, "gpt2", resid_pdrop=0.5, embd_pdrop=0.5))
    assert replace_dropout(model) == 5  # two in each block, one before them
    model.train()
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def run(sample: int) -> Tensor:
        with bind_samples(model, 1, torch.tensor([sample])), torch.no_grad():
            result: Tensor = model(tokens)
            return result

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_families_that_wanma_does_not_test_are_split_by_their_published_plans(tmp_path: Path) -> None:
    config = {
        **FAMILIES["llama"],
        "model_type": "granite",
        "logits_scaling": 8.0,
        "embedding_multiplier": 2.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = spec(tmp_path).require_parallel_spec("parallel.tp")
    assert layout.tensor_parallel_styles["model.layers.*.self_attn.k_proj"] == "key_value"
    assert (layout.first_stage_modules, layout.last_stage_modules) == (
        ("model.embed_tokens",),
        ("model.norm", "lm_head"),
    )
    ours, original = adapted(tmp_path), theirs(tmp_path)
    original.load_state_dict(as_published(ours, original.state_dict()), strict=False)
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), original(tokens).logits, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "decoder"),
    [("llama", True), ("qwen3", True), ("mixtral", True), ("qwen3_moe", True), ("gpt2", False)],
)
def test_the_planner_sees_its_parameters_and_flops(family: str, decoder: bool, tmp_path: Path) -> None:
    folder = write_config(tmp_path, family)
    section = ModelSection(huggingface=str(folder))
    assert (resolve_section_decoder_config(section, None) is not None) == decoder
    workload = build_section_workload(
        section, vocabulary_size=257, sequence_length=16, image_shape=None, classes=None
    )
    assert workload is not None
    model = adapted(folder)
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sum(layer.count for layer in workload.layers if "layers" in layer.name or ".h" in layer.name) == 2
    if family in ("llama", "gpt2"):
        matrices = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
        if family == "gpt2":
            matrices -= model.get_parameter("transformer.wpe.weight").numel()
        scores = 2 * 2 * 2 * 16 * 16 * 32 / 2  # layers · (scores, values) · multiply-add, causal
        assert workload.flops_per_sample == pytest.approx(3 * (2 * 16 * matrices + scores), rel=0.02)


def test_a_table_of_tokens_for_each_block_is_looked_up(tmp_path: Path) -> None:
    """Gemma 3n: given embeddings in the place of tokens, transformers leaves its second table out."""
    config = {**tiny_config("gemma3n_text"), "attention_dropout": 0.0, "sliding_window": 64}
    model = adapted(config_file(tmp_path, config))
    tokens = torch.randint(3, 300, (2, 8))
    assert model.probe_result.reads_tokens
    table = model.get_submodule("model.embed_tokens_per_layer").get_parameter("weight")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("correct_output_scale"):
                parameter.fill_(1.0)  # begins as 0, and the table would change nothing
        before = model(tokens)
        table.add_(torch.randn_like(table))
        assert not torch.allclose(model(tokens), before)


def test_a_model_type_that_is_another_name_of_a_family_is_that_family(tmp_path: Path) -> None:
    skip_if_refused("gpt2")
    model = adapted(config_file(tmp_path, {**tiny_config("gpt-sw3"), "attn_pdrop": 0.0}))
    assert model.config.model_type == "gpt2"
    assert model.parallel_spec.tensor_parallel_styles["transformer.h.*.attn.c_proj"] == "row"
