"""Offload to disk: other places of numbers, and not one bit of them changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import one_process, same_bits, spread_over
from support.measure import held_after
from support.ranks import Outcome, run_job
from support.text import DECODER, text_job
from support.traced import spread_traced
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Recompute
from wanma.job.sections.train import TrainSection
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.parallel.memory.disk_pool import DiskPool
from wanma.parallel.memory.offload import apply_activation_offload
from wanma.parallel.memory.recompute import apply_recompute
from wanma.planner.memory.peak import forecast_memory, pipeline_rank_memory
from wanma.training.loss.cross_entropy import cross_entropy_sum
from wanma.training.optimizer.named_optimizer import NamedOptimizer, ParameterRule
from wanma.training.optimizer.optimizer_state_offload import OptimizerStateOffload


def job(folder: Path, **train: Any) -> dict[str, Any]:
    model = {**DECODER, "layers": 4, "kv_heads": 2, "dropout": 0.1}
    keys = {"steps": 4, "global_batch": 6, "deterministic": True, "validation_samples": 2, **train}
    return text_job(folder, model, text=__file__, sequence_length=32, checkpoint={"every_steps": 2}, **keys)


DISK: dict[str, Any] = {
    "parameters": {"offload_parameters": "disk"},
    "optimizer": {"offload_optimizer": "disk"},
    "activations": {"offload_activations": "disk"},
}
ALL: dict[str, Any] = {key: value for kind in DISK.values() for key, value in kind.items()}
PLANS = {
    "1 rank, accumulating": Plan(micro_batch=3),
    "3 ranks ZeRO 3, uneven shards": Plan(dp_shard=3, shard="parameters", micro_batch=2, recompute="full"),
    "2 replicas": Plan(dp_replicate=2, micro_batch=2, recompute="selective", recompute_share=0.5),
    "tensor 2 × ZeRO 2": Plan(tp=2, dp_shard=2, shard="gradients", micro_batch=2),
    "pipeline 2": Plan(pp=2, micro_batch=2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.daily("1 rank, accumulating", "3 ranks ZeRO 3, uneven shards", "pipeline 2")
def test_every_plan_repeats_every_bit_with_everything_on_disk(name: str, tmp_path: Path) -> None:
    text = job(tmp_path)
    plain = spread_over(tmp_path / "plain", text, PLANS[name])
    other = spread_over(tmp_path / "run", text, replace(PLANS[name], **ALL))
    same_bits(plain, other)
    assert not (tmp_path / "run" / "scratch").exists()


@pytest.mark.parametrize(
    ("kind", "train"),
    [
        ("parameters", {"optimizer": "sgd", "weight_average": 0.5}),
        ("optimizer", {"optimizer": "muon"}),
        pytest.param("optimizer", {"optimizer": "adafactor"}, marks=pytest.mark.full),
        ("activations", {"precision": "bf16"}),
    ],
)
def test_every_kind_alone_repeats_every_bit(kind: str, train: dict[str, Any], tmp_path: Path) -> None:
    text = job(tmp_path, **train)
    same_bits(
        one_process(tmp_path / "plain", text, 3),
        spread_over(tmp_path / "run", text, Plan(micro_batch=3, **DISK[kind])),
    )


def test_a_checkpoint_does_not_know_where_state_was(tmp_path: Path) -> None:
    """Two steps with everything on disk and two without are four without, and the other way round."""
    plan = Plan(dp_shard=2, shard="optimizer", micro_batch=3)
    away = replace(plan, **ALL)
    whole = run_job(tmp_path / "whole", job(tmp_path, schedule="constant"), plan)
    for first, second in ((away, plan), (plan, away)):
        folder = tmp_path / f"first-{first.offload_parameters}"
        run_job(folder, job(tmp_path, steps=2, schedule="constant"), first)
        run_job(folder, job(tmp_path, schedule="constant"), second)
        same_bits(whole, Outcome(folder))


def test_parameters_are_updated_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wanma.training.optimizer.named_optimizer.OPTIMIZER_CHUNK_PARAMETERS", 70)
    train = TrainSection(learning_rate=0.1)

    def run(home: OptimizerStateOffload | None) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        parameters = {name: nn.Parameter(torch.randn(8, 8)) for name in "abc"}
        parameters["d"] = nn.Parameter(torch.randn(4))
        rules = {name: ParameterRule(1.0, 0.1) for name in parameters}
        updater = NamedOptimizer(parameters, rules, train, state_offload=home)
        for _ in range(3):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape)
            updater.step(0.1)
        return {n: p.detach() for n, p in parameters.items()} | updater.state_tensors(), len(
            updater._optimizers
        )

    plain, together = run(None)
    with DiskPool(tmp_path / "scratch") as scratch:
        stored, in_turn = run(OptimizerStateOffload("disk", scratch))
        assert scratch.reserved_bytes >= 2 * (3 * 64 + 4) * 4
        assert (together, in_turn) == (1, 3)  # a, b, and c with d
        assert stored.keys() == plain.keys()
        assert all(torch.equal(stored[name], plain[name]) for name in plain)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_stays_of_the_activations_is_what_the_forecast_says(
    mode: Recompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    acquire = DiskPool.acquire

    def count(pool: DiskPool, size: int) -> Tensor:
        lent.append(size)
        return acquire(pool, size)

    monkeypatch.setattr(DiskPool, "acquire", count)
    dimensions = DecoderConfig(4, 64, 4, 4, 192, 320)
    torch.manual_seed(0)
    model = Decoder(dimensions)
    blocks = list(model.layers.values())
    plan = Plan(micro_batch=6, recompute=mode, offload_activations="disk")
    workload = compute_decoder_workload(dimensions, 32)
    forecast = pipeline_rank_memory(workload, plan, "adamw", dimensions=dimensions)[0]
    at_loss = forecast.moments[0]
    tokens = torch.randint(64, (6, 32))
    losses: list[Tensor] = []
    with DiskPool(tmp_path / "scratch") as scratch:
        apply_recompute(blocks, plan)
        apply_activation_offload(blocks, plan, scratch)
        kept = held_after(lambda: losses.append(cross_entropy_sum(model(tokens), tokens)))
        assert at_loss.activations + at_loss.logits / 2 == pytest.approx(kept, rel=0.1)
        assert forecast.offloaded_activations == pytest.approx(sum(lent), rel=0.1)
        losses[0].backward()


def test_a_tensor_that_blocks_share_goes_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    acquire = DiskPool.acquire
    monkeypatch.setattr(DiskPool, "acquire", lambda pool, size: (lent.append(size), acquire(pool, size))[1])

    class Scale(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    def gradient(changes: bool) -> Tensor:
        blocks = [Scale(), Scale()]
        with DiskPool(tmp_path / "scratch") as scratch:
            apply_activation_offload(blocks, Plan(offload_activations="disk"), scratch)
            x = torch.ones(64, 64, requires_grad=True)
            mask = torch.full((64, 64), 3.0)
            hidden = blocks[0](x, mask)
            if changes:
                mask.mul_(2.0)
            blocks[1](hidden, mask).sum().backward()
        assert x.grad is not None
        return x.grad

    assert gradient(changes=False).unique().tolist() == [9.0]
    assert lent == [64 * 64 * 4]
    assert gradient(changes=True).unique().tolist() == [18.0]
    assert len(lent) == 3


@pytest.mark.full
def test_a_run_needs_less_memory_by_what_is_on_disk(tmp_path: Path) -> None:
    """26M parameters; a checkpoint is saved too, which in memory would be another copy of all state."""
    text = job(tmp_path, steps=2, global_batch=2)
    text["model"] = {"family": "decoder", "layers": 8, "hidden": 512, "heads": 8, "vocabulary": 320}
    dimensions = DecoderConfig(8, 512, 8, 8, 1408, 320)
    peaks, forecasts = [], []
    for plan in (Plan(micro_batch=2), Plan(micro_batch=2, **ALL)):
        run = run_job(tmp_path / plan.offload_parameters, text, plan)
        peaks.append(max(step["memory_bytes"] for step in run.steps))
        forecasts.append(
            forecast_memory(compute_decoder_workload(dimensions, 32), plan, "adamw", micro_batches=1)
        )
    assert forecasts[1].disk_bytes > 25_000_000 * 12
    saved = forecasts[0].memory_bytes - forecasts[1].memory_bytes
    # The kinds that a forecast adds up are not all at their largest at once.
    assert peaks[0] - peaks[1] > 0.5 * saved > 90 << 20


@pytest.mark.full
def test_compiled_blocks_offload_too(tmp_path: Path) -> None:
    plan = Plan(dp_shard=2, shard="parameters", micro_batch=3, recompute="full", recompute_share=0.5)
    plain = spread_over(tmp_path / "plain", job(tmp_path), plan)
    compiled = spread_traced(tmp_path / "run", job(tmp_path), replace(plan, compile=True, **ALL))
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-5)
    assert compiled.norms == pytest.approx(plain.norms, rel=1e-4)
