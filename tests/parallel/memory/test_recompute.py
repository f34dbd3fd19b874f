"""Recompute changes what is kept for backward, and not one bit of what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_bits, same_numbers, spread_over
from support.measure import held_after, size, storage
from support.text import DECODER, text_job
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.keyed_random.dropout import bind_samples
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.parallel.memory.recompute import apply_recompute
from wanma.parallel.memory.recomputed_attributes import RecomputedAttributeCheck


def build(plan: Plan) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(4, 32, 4, 2, 96, 64, dropout=0.1))
    names = [name for name, _ in model.named_parameters()]
    apply_recompute(list(model.layers.values()), plan)
    assert [name for name, _ in model.named_parameters()] == names
    return model


def forward(model: Decoder) -> Tensor:
    tokens = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(1))
    with bind_samples(model, 1, torch.arange(3)):
        loss: Tensor = model(tokens).square().sum()
    return loss


def gradients(plan: Plan) -> tuple[float, dict[str, Tensor], int]:
    """Loss and gradients of one forward and backward, and bytes held between the two."""
    model = build(plan)
    losses: list[Tensor] = []
    held = held_after(lambda: losses.append(forward(model)))
    losses[0].backward()
    return losses[0].item(), of(model), held


def of(model: Decoder) -> dict[str, Tensor]:
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def test_every_mode_and_share_gives_the_same_bits_and_keeps_less_the_more_it_recomputes() -> None:
    loss, expected, all_kept = gradients(Plan())
    held = {}
    for mode in ("selective", "full"):
        for share in (0.5, 1.0):
            got, gradient, held[mode, share] = gradients(Plan(recompute=mode, recompute_share=share))
            assert got == loss
            assert gradient.keys() == expected.keys()
            assert all(torch.equal(gradient[name], expected[name]) for name in expected)
    assert all_kept > held["selective", 0.5] > held["selective", 1.0] > held["full", 1.0]
    assert held["selective", 0.5] > held["full", 0.5] > held["full", 1.0]


@pytest.mark.parametrize("function", ["swiglu", "gelu"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_block_keeps_as_many_elements_as_forecasts_count(function: Any, mode: Recompute) -> None:
    tokens, held = torch.randint(64, (3, 16)), []
    for layers in (2, 6):
        dimensions = DecoderConfig(layers, 32, 4, 4, 128, 64, activation_function=function)
        model, losses = Decoder(dimensions), []
        apply_recompute(list(model.layers.values()), Plan(recompute=mode))
        held.append(held_after(lambda model=model, losses=losses: losses.append(model(tokens).sum())))
    layer = compute_decoder_workload(dimensions, 16).layers[1]
    assert layer.full_recompute_elements_per_sample is not None
    assert layer.selective_recompute_elements_per_sample is not None
    counted = {
        "none": layer.activation_elements_per_sample,
        "selective": layer.full_recompute_elements_per_sample + layer.selective_recompute_elements_per_sample,
        "full": layer.full_recompute_elements_per_sample,
    }
    assert (held[1] - held[0]) / 4 == 4 * 3 * counted[mode]


PLANS = {
    "2 ranks ZeRO 3, selective": Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="selective"),
    "2 ranks ZeRO 1, half of the blocks": Plan(
        dp_shard=2, shard="optimizer", micro_batch=1, recompute="full", recompute_share=0.5
    ),
    "tensor 2, selective": Plan(tp=2, micro_batch=3, recompute="selective"),
    "pipeline 2, selective": Plan(pp=2, micro_batch=1, recompute="selective", recompute_share=0.5),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("one")
    return one_process(folder, job(folder), 6)


def job(folder: Path, precision: str = "fp64") -> dict[str, Any]:
    model = {**DECODER, "layers": 4, "kv_heads": 2, "dropout": 0.1}
    train = {"steps": 3, "global_batch": 6, "deterministic": True, "validation_samples": 2}
    return text_job(folder, model, text=__file__, precision=precision, **train)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily("2 ranks ZeRO 3, selective", "tensor 2, selective", "pipeline 2, selective")
def test_every_plan_follows_one_process(name: str, tmp_path: Path, one: Any) -> None:
    same_numbers(one, spread_over(tmp_path / "run", job(tmp_path), PLANS[name]))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_low_precision_repeats_the_same_bits(mode: Recompute, tmp_path: Path) -> None:
    text = job(tmp_path, "bf16")
    same_bits(
        one_process(tmp_path / "plain", text, 3),
        spread_over(tmp_path / "again", text, Plan(micro_batch=3, recompute=mode)),
    )


@pytest.mark.full
def test_compiled_blocks_recompute_too() -> None:
    loss, expected, _ = gradients(Plan())
    held = {}
    modes: tuple[Recompute, ...] = ("none", "selective", "full")
    for mode in modes:
        torch._dynamo.reset()
        model = build(Plan(recompute=mode, compile=True))
        for block in model.layers.values():
            block.compile(backend="aot_eager")
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[storage(tensor)] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            got = forward(model)
        held[mode] = size(kept.values())
        got.backward()
        assert got.item() == pytest.approx(loss, rel=1e-6)
        for name, tensor in of(model).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    assert held["none"] > 1.5 * held["selective"] > 1.5 * held["full"]


class Counting(nn.Module):
    """A block that counts its forward passes in a buffer, by which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden: Tensor = x + self.linear(x).relu() * self.count
        return hidden


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_block_that_changes_a_buffer_is_refused(policy: Recompute) -> None:
    block = Counting()
    apply_recompute([block], Plan(recompute=policy))
    with torch.no_grad():
        block(torch.ones(2, 8))  # nothing is run again
    with pytest.raises(JobError, match="Counting changes its buffer count"):
        block(torch.ones(2, 8))


class Keeping(nn.Module):
    """A block that keeps something of each forward in an attribute."""

    def __init__(self, keep: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.keep = nn.Linear(8, 8), keep
        self.steps, self.seen, self.mean, self.cache = 0, [], torch.zeros(8), {}

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        hidden: Tensor = x + self.linear(x).relu()
        return hidden


def counts(block: Any, _: Tensor) -> None:
    block.steps += 1


def collects(block: Any, x: Tensor) -> None:
    block.seen.append(len(x))


def averages(block: Any, x: Tensor) -> None:
    block.mean = 0.9 * block.mean + 0.1 * x.detach().mean(0)


def averages_in_place(block: Any, x: Tensor) -> None:
    block.mean.lerp_(x.detach().mean(0), 0.1)


def sets_anew(block: Any, x: Tensor) -> None:
    block.cache["latest"], block.mean, block.seen = x.detach() * 2, x.mean(0), [len(x)]


@pytest.mark.parametrize("keep", [counts, collects, averages, averages_in_place])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_block_whose_attributes_a_second_run_changes_again_is_refused(
    policy: Recompute, keep: Callable[[Any, Tensor], None]
) -> None:
    block = Keeping(keep)
    apply_recompute([block], Plan(recompute=policy))
    with torch.no_grad():
        block(torch.ones(2, 8))  # nothing is run again
    output = block(torch.ones(2, 8))
    with pytest.raises(JobError, match=r"Keeping .* attribute (steps|seen|mean)"):
        output.sum().backward()


def test_a_block_that_sets_attributes_anew_is_not() -> None:
    block = Keeping(sets_anew)
    apply_recompute([block], Plan(recompute="full"))
    for index in range(6):
        block(torch.full((2, 8), float(index))).sum().backward()
    first, second = block(torch.ones(2, 8)), block(torch.zeros(2, 8))
    first.sum().backward()
    second.sum().backward()


def test_only_the_first_runs_are_compared() -> None:
    block = Keeping(sets_anew)
    watch, forward = RecomputedAttributeCheck(block), block.forward
    watched = [watch.wrap_forward(forward) is not forward for _ in range(6)]
    assert watched == [True] * 4 + [False] * 2
