from fnmatch import fnmatchcase

import torch
from torch import nn

from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.structure.parallel_spec import find_block_container, tie_parameters


def test_a_decoder_declares_what_to_do_with_each_of_its_modules() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(2, 32, 4, 2, 96, 64, qk_norm=True))
    layout = model.parallel_spec
    roles = {
        name: next(
            (role for pattern, role in layout.tensor_parallel_styles.items() if fnmatchcase(name, pattern)),
            None,
        )
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    }
    block = {
        "attention_norm": "norm",
        "attention.query": "column",
        "attention.key": "key_value",
        "attention.value": "key_value",
        "attention.output": "row",
        "attention.query_norm": "head_norm",
        "attention.key_norm": "head_norm",
        "feed_forward_norm": "norm",
        "feed_forward.gate": "column",
        "feed_forward.up": "column",
        "feed_forward.down": "row",
    }
    assert roles == {
        "embedding": "vocabulary",
        **{f"layers.{number}.{name}": role for number in (0, 1) for name, role in block.items()},
        "norm": "norm",
        "head": "head",
    }
    assert list(model.get_submodule(layout.blocks or "")._modules) == ["0", "1"]
    assert all(hasattr(model, name) for name in layout.first_stage_modules + layout.last_stage_modules)


def test_ties_broken_by_replacing_parameters_are_made_again() -> None:
    with torch.device("meta"):
        model = Decoder(DecoderConfig(1, 32, 4, 2, 96, 64, tie_embeddings=True))
    assert model.head is not None
    assert model.embedding is not None
    assert model.head.weight is model.embedding.weight
    model.to_empty(device="cpu")
    tie_parameters(model, model.parallel_spec.tied_parameters)
    assert model.head.weight is model.embedding.weight
    model.head = None  # a pipeline stage without the head has nothing to tie
    tie_parameters(model, model.parallel_spec.tied_parameters)


def test_repeated_blocks_are_found_by_structure() -> None:
    class Users(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.body = nn.Module()
            self.body.stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(5))
            self.head = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 4))

    assert find_block_container(Users()) == "body.stack"
    assert find_block_container(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) is None
    assert find_block_container(nn.Linear(2, 2)) is None
    assert find_block_container(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ""
