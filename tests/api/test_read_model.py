"""A job's model as the planner sees it, also where it is the user's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.planner.preparation.job_planning import initial_layout, job_dimensions, prepare_job
from wanma.planner.preparation.job_workload import read_model

OWN = '''
import torch
from torch import nn

class Tiny(nn.Module):
    """(rows, sequence) tokens to (rows, sequence, 100)."""

    def __init__(self, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.head = nn.Linear(16, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

class Huge(Tiny):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2_000_000_000, 16)

class Looks(Tiny):
    def __init__(self):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]

def dataset():
    from torch.utils.data import TensorDataset
    return TensorDataset(torch.zeros(20, 4), torch.zeros(20, 1))

def classifier():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * 32 * 32), nn.Linear(3 * 32 * 32, 10))

def regression():
    return nn.Linear(4, 1)
'''


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


def test_a_factory_of_a_text_model_is_read_with_sequences_of_the_data() -> None:
    job = to_job({"model": {"factory": "own_models:Tiny"}, "data": {"sequence_length": 32}})
    workload, reason = read_model(job)
    assert reason is None
    assert workload.tokens_per_sample == 32
    assert workload.output_elements_per_sample == 32 * 100
    assert [(layer.name, layer.count, layer.is_block) for layer in workload.layers][:3] == [
        ("embedding", 1, False),
        ("blocks", 3, True),
        ("head", 1, False),
    ]
    assert sum(layer.count * layer.flops_per_sample for layer in workload.layers) == 32 * 2 * 16 * (
        3 * 16 + 100
    )


def test_arguments_of_the_factory_and_the_precision_of_the_job_count() -> None:
    model = {"factory": "own_models:Tiny", "arguments": {"layers": 5}}
    plain, low = (
        read_model(
            to_job({"model": model, "data": {"sequence_length": 32}, "train": {"precision": precision}})
        ).workload
        for precision in ("fp32", "bf16")
    )
    assert plain.layers[1].count == low.layers[1].count == 5
    # Tokens, of eight bytes, are twice as many elements of half the size.
    assert low.layers[0].activation_elements_per_sample == 2 * plain.layers[0].activation_elements_per_sample


def test_a_model_that_no_memory_holds_is_read() -> None:
    job = to_job({"model": {"factory": "own_models:Huge"}, "data": {"sequence_length": 32}})
    workload, _ = read_model(job)
    assert workload.parameters > 32e9


def test_a_factory_that_looks_at_values_has_no_forecast_and_says_why() -> None:
    job = to_job({"model": {"factory": "own_models:Looks"}, "data": {"sequence_length": 32}})
    workload, reason = read_model(job)
    assert workload is None
    assert "'own_models:Looks' failed" in reason


def test_a_factory_that_is_not_there_is_an_error() -> None:
    job = to_job({"model": {"factory": "own_models:Missing"}, "data": {"sequence_length": 32}})
    with pytest.raises(JobError, match=r"model\.factory"):
        read_model(job)


def test_a_dataset_of_ones_own_gives_the_inputs() -> None:
    job = to_job({"model": {"factory": "own_models:regression"}, "data": {"factory": "own_models:dataset"}})
    workload, reason = read_model(job)
    assert reason is None
    assert (workload.parameters, workload.tokens_per_sample) == (5, 1)


def test_a_module_that_was_passed_is_read_with_its_data_and_not_changed() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    data = TensorDataset(torch.zeros(10, 6), torch.zeros(10, 2))
    job = to_job({"model": {"factory": "somewhere:else"}})
    workload, reason = read_model(job, {"model": model, "data": data})
    assert reason is None
    assert workload.parameters == 6 * 8 + 8 + 2 * 8 + 8 * 2 + 2
    assert isinstance(model[1], nn.BatchNorm1d)
    assert model[0].weight.grad is None


def test_a_module_with_constants_in_32_bits_is_read_as_it_runs() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(6))
            self.out = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(x * self.scale)

    job = to_job({"model": {"factory": "somewhere:else"}, "train": {"precision": "bf16"}})
    data = TensorDataset(torch.zeros(10, 6), torch.zeros(10, 2))
    workload, reason = read_model(job, {"model": Scaled(), "data": data})
    assert reason is None  # autocast makes the product's operands alike
    assert workload is not None


def test_a_module_that_cannot_be_read_says_so() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    job = to_job({"model": {"factory": "somewhere:else"}})
    data = TensorDataset(torch.zeros(10, 6), torch.zeros(10, 2))
    workload, reason = read_model(job, {"model": Looks(), "data": data})
    assert workload is None
    assert "cannot trace Looks on fake tensors" in reason


def test_a_run_reads_a_module_only_where_its_forecast_decides_something() -> None:
    given = {
        "model": {"factory": "own_models:Tiny"},
        "data": {"sequence_length": 32, "text": ["stdlib"]},
        "train": {"global_batch": 8},
        "cluster": {"device": "cpu"},
    }
    job = to_job(given)
    objects = {"model": nn.Linear(4, 1), "data": TensorDataset(torch.zeros(40, 4), torch.zeros(40, 1))}
    start = initial_layout(job, custom_model=True)
    assert prepare_job(job, start, objects=objects).workload is None
    asked = prepare_job(job, start, objects=objects, read_custom_model=True)
    assert asked.workload is not None
    assert asked.plan_result.forecast.parameters_bytes > 0
    deciding = to_job({**given, "parallel": {"recompute": "auto"}})
    decided = prepare_job(deciding, start, objects=objects)
    assert decided.workload is not None


def test_batch_normalization_says_how_many_samples_belong_together() -> None:
    own = {"factory": "own_models:classifier", "batch_norm_group": 8}
    pictures = TensorDataset(torch.zeros(10, 3, 32, 32), torch.zeros(10, dtype=torch.int64))
    made = read_model(to_job({"model": own}), {"data": pictures}).workload
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    data = TensorDataset(torch.zeros(10, 6), torch.zeros(10, 8))
    passed = read_model(to_job({"model": own}), {"model": model, "data": data}).workload
    plain = read_model(to_job({"model": own}), {"model": model[:1], "data": data}).workload
    assert [one and one.coupled_samples for one in (made, passed, plain)] == [8, 8, 1]


def test_tokens_of_a_dataset_need_no_tokenizer() -> None:
    model = {"family": "decoder", "layers": 1, "hidden": 32, "heads": 2, "vocabulary": 65}
    own = to_job({"model": model, "data": {"factory": "own_models:dataset"}})
    dimensions = job_dimensions(own)
    assert dimensions.vocabulary == 65
    assert read_model(own).workload is not None
    with pytest.raises(JobError, match="vocabulary of 65 is smaller than the tokenizer's 257"):
        job_dimensions(to_job({"model": model, "data": {"text": ["stdlib"]}}))
