"""Models of transformers as wanma sees a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.huggingface import FAMILIES, write_config
from wanma.job.sections import ModelSection
from wanma.models.build import ModelSpec, build_model, model_spec
from wanma.models.huggingface import HuggingFaceModel
from wanma.models.published import choose, published_shapes


def spec(folder: Path, vocabulary: int | None = 257, length: int = 16, **arguments: Any) -> ModelSpec:
    section = ModelSection(huggingface=str(folder), arguments=arguments)
    return model_spec(section, vocabulary=vocabulary, sequence_length=length, image_shape=None, classes=None)


def adapted(folder: Path, **arguments: Any) -> HuggingFaceModel:
    model = build_model(spec(folder, **arguments), seed=1)
    assert isinstance(model, HuggingFaceModel)
    return model.eval()


def theirs(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def as_published(model: HuggingFaceModel, names: Mapping[str, object]) -> dict[str, Tensor]:
    """The parameters under those of their published names that are in `names`."""
    chosen = {}
    for name, parameter in model.named_parameters():
        pieces = choose(model.published(name, tuple(parameter.shape)), names)
        assert pieces is not None, name
        chosen[name] = pieces, parameter
    tensors = {n: torch.empty(s) for n, s in published_shapes(w for w, _ in chosen.values()).items()}
    for pieces, parameter in chosen.values():
        for piece in pieces:
            ends = (at + size for at, size in zip(piece.offset, piece.published_shape, strict=True))
            part = parameter.detach()[piece.first : piece.first + piece.shape[0]]
            tensors[piece.tensor][tuple(map(slice, piece.offset, ends))] = piece.to_published(part)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, family)
    ours, original = adapted(folder), theirs(folder)
    state = original.state_dict()
    missing, unexpected = original.load_state_dict(as_published(ours, state), strict=False)
    assert unexpected == []
    assert missing == [other for _, other in ours.layout.tied]
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
            assert float(tensor.std()) == pytest.approx(float(like.std()), rel=0.2), name
            assert abs(float(tensor.mean())) < 0.2 * float(like.std()), name
