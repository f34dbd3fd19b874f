"""Modules read operator by operator, beside torch's own count and what a real run keeps."""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from support.flops import attention_on_cpu
from support.huggingface import write_config
from support.modules import ImageTransformer, Recommender, Translator
from support.text import text_spec
from wanma.job.errors import WanmaError
from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.forecast.operators import Matmul, Operator
from wanma.job.sections.model import ModelSection
from wanma.models.architectures.decoder import Decoder
from wanma.models.architectures.image_classifiers import build_image_classifier
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.resolution import resolve_vision_config
from wanma.models.model_spec import build_model
from wanma.models.workload.model_workload import build_section_workload, trace_module_workload

Made = tuple[nn.Module, tuple[Tensor, ...]]


def resnet() -> Made:
    sizes = resolve_vision_config(ModelSection(preset="resnet-18", batch_norm_group=2), (3, 32, 32), 10)
    return build_image_classifier(sizes), (torch.zeros(2, 3, 32, 32),)


def convnet() -> Made:
    sizes = resolve_vision_config(ModelSection(preset="cifar-convnet"), (3, 32, 32), 10)
    return build_image_classifier(sizes), (torch.zeros(2, 3, 32, 32),)


def decoder() -> Made:
    with torch.device("cpu"):
        model = Decoder(DecoderConfig(3, 64, 4, 2, 192, 320))
    return model, (torch.zeros(2, 64, dtype=torch.int64),)


def huggingface() -> Made:
    pytest.importorskip("transformers")
    with tempfile.TemporaryDirectory() as folder:
        section = ModelSection(
            huggingface=str(write_config(Path(folder) / "gpt2", "gpt2", resid_pdrop=0.0, embd_pdrop=0.0))
        )
        spec = text_spec(section, 320, 32)
    return build_model(spec, 1), (torch.zeros(2, 32, dtype=torch.int64),)


def recommender() -> Made:
    return Recommender(), (torch.zeros(4, 13), torch.zeros(4, 2, 3, dtype=torch.int64))


def translator() -> Made:
    return Translator(), (torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64))


def image_transformer() -> Made:
    return ImageTransformer(), (torch.zeros(2, 3, 32, 32),)


def recurrent() -> Made:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.out = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cells(x)[0][:, -1])

    return Last(), (torch.zeros(2, 5, 16),)


MODELS: dict[str, Callable[[], Made]] = {
    "resnet": resnet,
    "convnet": convnet,
    "decoder": decoder,
    "hugging face": huggingface,
    "recommender": recommender,
    "translator": translator,
    "image transformer": image_transformer,
    "recurrent": recurrent,
}


def flops(workload: Workload, *phases: str) -> float:
    return sum(
        layer.count * one.flops_per_sample
        for layer in workload.layers
        for one in layer.operators
        if one.phase in phases
    )


def operators(workload: Workload, kind: str, phase: str = "forward") -> list[Operator]:
    every = (one for layer in workload.layers for one in layer.operators)
    return [
        one for one in every if (one.kind, one.phase) == (kind, phase) and one.execution_mode != "compiled"
    ]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_flops_forward_and_backward_are_torchs_own_count(make: Callable[[], Made]) -> None:
    model, inputs = make()
    workload = trace_module_workload(model, inputs)
    model.train()
    with torch.backends.mkldnn.flags(enabled=False):
        forward = FlopCounterMode(display=False, custom_mapping=attention_on_cpu())
        with forward:
            output = model(*inputs)
        output = output if isinstance(output, Tensor) else output.logits
        backward = FlopCounterMode(display=False, custom_mapping=attention_on_cpu())
        with backward:
            output.sum().backward()
    rows = inputs[0].shape[0]
    assert flops(workload, "forward") == pytest.approx(forward.get_total_flops() / rows, rel=0.01)
    assert sum(layer.count * layer.flops_per_sample for layer in workload.layers) == pytest.approx(
        flops(workload, "forward")
    )
    assert flops(workload, "inputs", "weights") == pytest.approx(backward.get_total_flops() / rows, rel=0.01)


@pytest.mark.parametrize("make", [m for name, m in MODELS.items() if name != "recurrent"])
def test_what_is_kept_for_backward_is_what_a_real_forward_keeps(make: Callable[[], Made]) -> None:
    model, _ = make()
    rows = 16
    inputs = tuple(x[:1].expand(rows, *x.shape[1:]).contiguous() for x in make()[1])
    if isinstance(model, nn.Module) and hasattr(model, "bn1"):
        for part in model.modules():
            if hasattr(part, "group_size"):
                part.group_size = rows
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(model.train()(*inputs))  # the loss keeps what it is computed from
    workload = trace_module_workload(model, inputs)
    elements = sum(layer.count * layer.activation_elements_per_sample for layer in workload.layers)
    # The largest block stands for all; what all samples share is not counted.
    assert 4 * elements * rows == pytest.approx(sum(kept.values()), rel=0.04)


def test_a_table_of_100_gigabytes_is_read_without_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    workload = trace_module_workload(
        lambda: Recommender(rows=(200_000_000, 1000), width=128),
        (torch.zeros(1, 13), torch.zeros(1, 2, 1, dtype=torch.int64)),
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert workload.parameters > 25e9  # 102 GB in fp32
    assert grown < 512 * 1024  # KiB


def test_a_lookup_reads_only_the_rows_that_are_asked_for() -> None:
    inputs = (torch.zeros(4, 13), torch.zeros(4, 2, 3, dtype=torch.int64))
    workload = trace_module_workload(Recommender(rows=(1000, 5000), width=16), inputs)
    first, second = operators(workload, "lookup")
    # Three indices of eight bytes, their rows of 16, and the sum that is written.
    assert first.elements_per_sample == second.elements_per_sample == 3 * 2 + 3 * 16 + 16
    assert first.fixed_elements == 0
    assert first.embedding_row_elements == 16
    # Their gradient is a whole table.
    back = operators(workload, "lookup", "weights")
    assert [one.fixed_elements for one in back] == [1000 * 16, 5000 * 16]


def test_tables_with_sparse_gradients_are_not_updated_as_a_whole() -> None:
    inputs = (torch.zeros(4, 13), torch.zeros(4, 2, 3, dtype=torch.int64))
    workload = trace_module_workload(Recommender(rows=(1000, 5000), width=16, sparse=True), inputs)
    tables = [layer for layer in workload.layers if layer.name.startswith("tables")]
    assert [layer.trainable_parameters for layer in tables] == [0, 0]
    assert all(one.fixed_elements == 0 for one in operators(workload, "lookup", "weights"))


def test_a_sparse_embedding_sorts_and_changes_the_rows_that_were_asked_for() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(1000, 16, sparse=True)

        def forward(self, indices: Tensor) -> Tensor:
            return self.rows(indices)

    workload = trace_module_workload(Table(), (torch.zeros(2, 3, dtype=torch.int64),))
    (changed,) = operators(workload, "lookup", "weights")
    # Each gradient is read; equal ones are added up, and the table's rows read and written.
    assert (changed.elements_per_sample, changed.fixed_elements) == (3 * 16 * (1 + 5), 0.0)
    (sort,) = operators(workload, "gather", "weights")
    assert sort.kernel_count == 8


def test_a_linear_layer_is_three_products() -> None:
    workload = trace_module_workload(
        nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)), (torch.zeros(7, 8),), blocks=()
    )
    first, second = workload.layers
    assert [(one.phase, one.matmul) for one in first.operators if one.matmul] == [
        ("forward", Matmul(1.0, 5.0, 8.0, 1.0, "m")),
        ("weights", Matmul(5.0, 8.0, 1.0, 1.0, "k")),  # nobody asks for the gradient of the data
    ]
    assert [(one.phase, one.matmul) for one in second.operators if one.matmul] == [
        ("forward", Matmul(1.0, 3.0, 5.0, 1.0, "m")),
        ("inputs", Matmul(1.0, 5.0, 3.0, 1.0, "m")),
        ("weights", Matmul(3.0, 5.0, 1.0, 1.0, "k")),
    ]
    forward = next(one for one in first.operators if one.matmul)
    assert (forward.elements_per_sample, forward.fixed_elements) == (8 + 5, 8 * 5 + 5)


def test_a_convolution_is_a_product_of_its_windows() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2))
    workload = trace_module_workload(model, (torch.zeros(3, 4, 10, 10),), blocks=())
    products = {one.phase: one.matmul for one in workload.layers[1].operators if one.matmul}
    assert products["forward"] == Matmul(25.0, 8.0, 36.0, 2.0, "m")
    assert products["weights"] == Matmul(36.0, 8.0, 25.0, 2.0, "k")
    # As many multiplications, of one row for each pixel of the input.
    assert products["inputs"] == Matmul(100.0, 4.0, 18.0, 2.0, "m")
    forward = next(one for one in workload.layers[1].operators if one.matmul)
    assert forward.elements_per_sample == 800 + 400
    assert forward.fixed_elements == 16 * 4 * 9 + 16


def test_a_transposed_convolution_has_a_row_for_each_pixel_of_its_input() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 8, 2, stride=2, bias=False))
    inputs = (torch.zeros(2, 4, 5, 5),)
    workload = trace_module_workload(model, inputs)
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    assert flops(workload, "forward") == counter.get_total_flops() / 2
    assert operators(workload, "convolution")[0].matmul == Matmul(25.0, 32.0, 4.0, 1.0, "m")


def test_attention_says_its_heads_and_whether_it_is_causal() -> None:
    model, inputs = decoder()
    found = {one.phase: one.attention for one in operators(trace_module_workload(model, inputs), "attention")}
    attention = found["forward"]
    assert attention is not None
    assert (attention.sequences, attention.queries, attention.keys) == (1.0, 64, 64)
    assert (attention.heads, attention.head_dim, attention.is_causal) == (4, 16, True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_elements_are_counted_in_the_precision_that_computes(precision: str) -> None:
    class Precise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 2).to(x.dtype)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.precise = nn.Linear(4, 4, bias=False), Precise()

        def forward(self, x: Tensor) -> Tensor:
            return self.precise(self.out(x))

    workload = trace_module_workload(Scaled(), (torch.zeros(2, 4),), precision=precision)  # type: ignore[arg-type]
    (streamed,) = operators(workload, "elementwise")
    # In fp32 one product; in bf16 casts there and back, of 4 and 8 bytes, around one in fp32.
    assert streamed.elements_per_sample == (8 if precision == "fp32" else 4 * (3 + 4 + 3))


def test_a_compiler_writes_only_what_others_need() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x * self.scale).cos()

    workload = trace_module_workload(Chain(), (torch.zeros(2, 8),))
    (layer,) = workload.layers
    forward = {one.execution_mode: one for one in layer.operators if one.phase == "forward"}
    assert (forward["eager"].kernel_count, forward["eager"].elements_per_sample) == (3, 6 * 8)
    # One read, and two written: what GELU and the cosine were given is saved for backward, and the result.
    assert (forward["compiled"].kernel_count, forward["compiled"].elements_per_sample) == (1, 4 * 8)


def test_repeated_blocks_are_found_wherever_they_are() -> None:
    model, inputs = translator()
    blocks = {
        layer.name: layer.count for layer in trace_module_workload(model, inputs).layers if layer.is_block
    }
    assert blocks == {"encoder": 2, "decoder": 2}
    model, inputs = huggingface()
    found = {layer.name: layer for layer in trace_module_workload(model, inputs).layers}
    (blocks,) = [layer for layer in found.values() if layer.is_block]
    assert (blocks.name, blocks.count) == ("transformer.h", 2)
    assert found["transformer.wte"].parameters == 320 * 32


def test_what_the_loss_is_computed_from_counts_for_the_layer_that_gives_it() -> None:
    workload = trace_module_workload(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3)), (torch.zeros(2, 8),))
    assert workload.output_elements_per_sample == 3
    assert [layer.activation_elements_per_sample for layer in workload.layers] == [8, 5 + 3]


def test_numbers_of_samples_do_not_matter() -> None:
    model = ImageTransformer()
    one, many = (trace_module_workload(model, (torch.zeros(rows, 3, 32, 32),)) for rows in (1, 24))
    for left, right in zip(one.layers, many.layers, strict=True):
        assert left.flops_per_sample == right.flops_per_sample
        assert left.activation_elements_per_sample == pytest.approx(
            right.activation_elements_per_sample, rel=1e-3
        )


def test_normalization_over_groups_is_counted_once() -> None:
    single, grouped = (
        build_section_workload(
            ModelSection(preset="resnet-18", batch_norm_group=group),
            vocabulary_size=None,
            sequence_length=1,
            image_shape=(3, 32, 32),
            classes=10,
        )
        for group in (1, 32)
    )
    assert single is not None
    assert grouped is not None
    assert (single.coupled_samples, grouped.coupled_samples) == (1, 32)
    assert replace(single, coupled_samples=32) == grouped


def test_a_model_that_compares_samples_is_refused() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.out(x)
            return y @ y.T

    with pytest.raises(WanmaError, match="square of the number of samples"):
        trace_module_workload(Contrast(), (torch.zeros(2, 4),))


def test_frozen_parameters_have_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    first, second = trace_module_workload(model, (torch.zeros(2, 4),), blocks=()).layers
    assert (first.trainable_parameters, second.trainable_parameters) == (0, None)
    assert {one.phase for one in first.operators} == {"forward"}


def test_a_workload_survives_json() -> None:
    model, inputs = decoder()
    workload = trace_module_workload(model, inputs, 64)
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload
    assert Workload((LayerWorkload("one", 1, 2, 3.0, 4.0),), 1) == Workload.from_json(
        Workload((LayerWorkload("one", 1, 2, 3.0, 4.0),), 1).to_json()
    )
