"""A run that stops and carries on ends as if it had never stopped (laws 2 and 4)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.compare import equal, same_curve
from support.own import Numbers
from support.ranks import Outcome, run_here, run_job
from support.recovering import cut_back
from support.recovering import job as recovering_job
from wanma.checkpoint.conversion.conversion import convert_checkpoint
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan

ONE = Plan(micro_batch=6)


def job(folder: Path, steps: int = 6, **train: Any) -> dict[str, Any]:
    return recovering_job(folder, "auto", 2, steps=steps, **train)


class Noisy(nn.Sequential):
    """Draws from torch's own generator, which nothing keys by sample."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + torch.randn_like(inputs) if self.training else inputs)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(micro_batch=3),
        Plan(dp_replicate=2, micro_batch=2),
        Plan(dp_shard=2, shard="parameters", micro_batch=3),
        Plan(tp=2, micro_batch=6),
    ],
    ids=str,
)
@pytest.mark.daily("1 rank (one process), fp32, cpu", "2 ranks (dp_shard 2), parameters sharded, fp32, cpu")
def test_carrying_on_is_bitwise_the_same_as_never_having_stopped(plan: Plan, tmp_path: Path) -> None:
    whole = run_job(tmp_path / "whole", job(tmp_path, steps=4), plan)
    run_job(tmp_path / "parts", job(tmp_path, steps=2), plan)
    parts = run_job(tmp_path / "parts", job(tmp_path, steps=4), plan)
    assert parts.losses == whole.losses
    assert [step["step"] for step in parts.steps] == [1, 2, 3, 4]
    equal(whole, parts)


def exact_job(folder: Path, steps: int) -> dict[str, Any]:
    """Job in fp64 and without dropout, which every plan follows."""
    text = job(folder, steps, precision="fp64")
    text["model"]["dropout"] = 0.0
    return text


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run of `exact_job` in one process that never stops."""
    folder = tmp_path_factory.mktemp("exact")
    return run_job(folder / "run", exact_job(folder, 4), replace(ONE, precision="fp64"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Plan(dp_shard=2, shard="parameters", micro_batch=3), Plan(micro_batch=6)),
        (Plan(micro_batch=6), Plan(dp_replicate=2, dp_shard=2, shard="gradients", micro_batch=2)),
        (
            Plan(dp_shard=4, shard="optimizer", micro_batch=2),
            Plan(dp_shard=2, shard="parameters", micro_batch=3),
        ),
        (Plan(pp=2, micro_batch=2), Plan(tp=2, micro_batch=6)),
        (
            Plan(tp=2, dp_shard=2, shard="parameters", micro_batch=3),
            Plan(pp=2, dp_shard=2, shard="gradients", micro_batch=1),
        ),
    ],
    ids=str,
)
@pytest.mark.daily(
    "2 ranks (dp_shard 2), parameters sharded, fp32, cpu-1 rank (one process), fp32, cpu",
    "2 ranks (pp 2), fp32, cpu-2 ranks (tp 2), fp32, cpu",
)
def test_carrying_on_with_another_plan_follows_the_same_curve(
    first: Plan, second: Plan, exact: Outcome, tmp_path: Path
) -> None:
    first, second = replace(first, precision="fp64"), replace(second, precision="fp64")
    run_job(tmp_path / "parts", exact_job(tmp_path, 2), first)
    parts = run_job(tmp_path / "parts", exact_job(tmp_path, 4), second)
    same_curve(exact, parts, 1e-10)


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
@pytest.mark.daily("adafactor", "muon")
def test_every_optimizer_resumes_exactly(optimizer: str, tmp_path: Path) -> None:
    text = job(tmp_path, steps=4, optimizer=optimizer)
    whole = run_job(tmp_path / "whole", text, ONE)
    equal(whole, run_job(cut_back(whole, 2, tmp_path / "parts"), text, ONE))


def test_a_ramp_of_the_batch_size_resumes_exactly(tmp_path: Path) -> None:
    ramp = {"global_batch": 2, "batch_ramp": [[1, 4], [3, 6]]}
    plan = Plan(dp_replicate=2, micro_batch=1)
    whole = run_job(tmp_path / "whole", job(tmp_path, **ramp), plan)
    assert [step["samples"] for step in whole.steps] == [2, 6, 10, 16, 22, 28]
    equal(whole, run_job(cut_back(whole, 4, tmp_path / "parts"), job(tmp_path, **ramp), plan))


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    whole = run_job(tmp_path / "whole", job(tmp_path), ONE)
    parts = cut_back(whole, 4, tmp_path / "parts")
    newest = parts / "checkpoints" / "step-00000004" / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    equal(whole, run_job(parts, job(tmp_path), ONE))
    events = (parts / "events.jsonl").read_text()
    assert '"source": "step-00000002"' in events
    assert "step-00000004" in events


def test_a_run_of_which_no_checkpoint_is_whole_stops_rather_than_begin_anew(tmp_path: Path) -> None:
    plan, run = Plan(dp_replicate=2, micro_batch=3), tmp_path / "run"
    before = run_job(run, job(tmp_path, steps=4), plan).losses
    for file in run.glob("checkpoints/step-*/rank-00001.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(AssertionError) as stopped:
        run_job(run, job(tmp_path), plan)
    told = str(stopped.value)
    assert f"in {run}/checkpoints:" in told
    assert told.index("step-00000004 is skipped: rank-00001") < told.index(
        "step-00000002 is skipped: rank-00001"
    )
    assert "--fresh" in told
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    assert Outcome(run).losses == before

    again = job(tmp_path, steps=3)
    again["checkpoint"]["resume"] = False
    assert [step["step"] for step in run_job(run, again, plan).steps] == [1, 2, 3]
    assert len(list(run.glob("checkpoints-before-1/step-*"))) == 2


def test_a_run_whose_checkpoints_somebody_has_removed_says_that_it_begins_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_job(run, job(tmp_path, steps=2), ONE)
    said = (
        f"metrics of 2 steps exist, but {run}/checkpoints holds no checkpoint: "
        "training starts again at step 0"
    )
    assert said not in (run / "events.jsonl").read_text()
    shutil.rmtree(run / "checkpoints")
    assert [step["step"] for step in run_job(run, job(tmp_path, steps=2), ONE).steps] == [1, 2]
    assert said in (run / "events.jsonl").read_text()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run of two steps in one process."""
    folder = tmp_path_factory.mktemp("two steps")
    return run_job(folder / "run", job(folder, steps=2), ONE)


@pytest.fixture
def run(two_steps: Outcome, tmp_path: Path) -> Path:
    """Directory of a run of two steps."""
    return cut_back(two_steps, 2, tmp_path / "run")


def test_another_optimizer_is_refused_as_that_and_not_as_another_model(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"train\.optimizer was \"adamw\", and is \"sgd\""):
        run_here(run, job(tmp_path, optimizer="sgd"), ONE)
    changed = job(tmp_path, optimizer="sgd")
    changed["checkpoint"]["resume"] = "changed"
    with pytest.raises(WanmaError, match="state of another optimizer"):
        run_here(run, changed, ONE)


def test_weights_of_a_converted_checkpoint_start_a_run_in_their_other_precision(tmp_path: Path) -> None:
    whole = run_job(tmp_path / "run", job(tmp_path, steps=2, weight_average=0.0), ONE)
    path, out = tmp_path / "run" / "checkpoints" / "step-00000002", tmp_path / "out"
    convert_checkpoint(path, out, {name: "BF16" for name in whole.tensors() if name.startswith("model.")})
    start = job(tmp_path, steps=1, learning_rate=1e-30, weight_decay=0.0)
    start["checkpoint"]["start_from"] = str(out)
    started = run_job(tmp_path / "started", start, ONE).tensors()
    for name, tensor in whole.tensors().items():
        if name.startswith("model."):
            assert torch.equal(started[name], tensor.bfloat16().float()), name


def test_draws_of_a_module_of_one_s_own_are_those_of_the_seed_and_carry_on(tmp_path: Path) -> None:
    objects = {"model": Noisy(), "data": Numbers()}

    def run(name: str, **train: Any) -> Outcome:
        text = {**job(tmp_path, steps=4, **train), "model": {"factory": "a:b"}, "data": {}}
        torch.seed()  # as in each new process
        return run_here(tmp_path / name, text, ONE, objects)

    whole = run("whole")
    assert run("again").losses == whole.losses
    assert run("other", seed=2).losses != whole.losses
    cut_back(whole, 2, tmp_path / "parts")
    equal(whole, run("parts"))


def test_a_folder_to_start_from_that_is_not_there_is_told_so(tmp_path: Path) -> None:
    start = job(tmp_path)
    start["checkpoint"]["start_from"] = str(tmp_path / "nowhere")
    with pytest.raises(WanmaError, match="nowhere': there is no such folder"):
        run_here(tmp_path / "run", start, ONE)


def test_another_model_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    other = job(tmp_path)
    other["model"]["hidden"] = 64
    with pytest.raises(WanmaError, match=r"model\.hidden was 32, and is 64"):
        run_here(run, other, ONE)


def test_other_data_is_refused(run: Path, tmp_path: Path) -> None:
    other = job(tmp_path)
    other["data"]["text"] = [str(Path(__file__).parents[1] / "support")]
    with pytest.raises(WanmaError, match="other data"):
        run_here(run, other, ONE)


def test_another_batch_size_is_refused_because_the_position_would_be_lost(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"train\.global_batch"):
        run_here(run, job(tmp_path, global_batch=3), ONE)


@pytest.mark.parametrize(
    "plan",
    [Plan(dp_shard=2, shard="parameters", micro_batch=3), Plan(pp=2, micro_batch=2)],
    ids=str,
)
@pytest.mark.daily("2 ranks (dp_shard 2), parameters sharded, fp32, cpu")
def test_an_average_of_the_weights_may_begin_and_end_on_the_way(plan: Plan, tmp_path: Path) -> None:
    """Begun after step 2 with decay 0.5, it is halfway between the weights of steps 2 and 3 after step 3."""
    run, folder = tmp_path / "run", tmp_path
    run_job(run, job(folder, steps=2, weight_average=0.0), plan)
    averaged = run_job(run, job(folder, steps=3, weight_average=0.5), plan)
    said = (run / "events.jsonl").read_text()
    assert "step-00000002 has no averaged weights" in said
    before, after = averaged.tensors(2), averaged.tensors(3)
    names = [name.removeprefix("average.") for name in after if name.startswith("average.")]
    assert set(names) == {name.removeprefix("model.") for name in before if name.startswith("model.")}
    for name in names:
        expected = torch.lerp(before[f"model.{name}"], after[f"model.{name}"], 0.5)
        assert torch.equal(after[f"average.{name}"], expected), name

    left = run_job(run, job(folder, steps=4, weight_average=0.0), plan)
    said = (run / "events.jsonl").read_text()
    assert "the averaged weights of step-00000003" in said
    assert not [name for name in left.tensors(4) if name.startswith("average.")]
    assert [step["step"] for step in left.steps] == [1, 2, 3, 4]
