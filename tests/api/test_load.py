"""`wanma.load`: a run's model as a plain module, and the text that it writes."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wanma
from support.ranks import Outcome, run_here, run_job
from support.text import SMALL_DECODER, text_job
from wanma.cli.main import main
from wanma.job.errors import WanmaError
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job


def trained(
    folder: Path,
    model: dict[str, Any],
    plan: Plan | None = None,
    data: dict[str, Any] | None = None,
    **train: Any,
) -> Outcome:
    """A short run, as `wanma train` leaves it."""
    keys = {"steps": 2, "global_batch": 2, "validation_samples": 2, **train}
    text, saved = Path(json.__file__).parent, {"every_steps": 1}
    job = text_job(folder, model, text=text, checkpoint=saved, **keys)
    if data is not None:
        job["data"] = data
    run = run_here if plan is None or plan.world_size == 1 else run_job
    outcome = run(folder / "runs" / "mine", job, plan or Plan(micro_batch=2), {})
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(job)))
    return outcome


def test_a_run_of_a_pipeline_is_a_plain_module_that_has_its_validation_loss(tmp_path: Path) -> None:
    model = {**SMALL_DECODER, "activation_function": "gelu"}
    outcome = trained(tmp_path, model, Plan(pp=2, micro_batch=1), validation_samples=1)
    loaded = wanma.load(outcome.directory)
    assert not any(module.training for module in loaded.model.modules())
    assert (loaded.step, loaded.averaged, loaded.config.train.steps) == (2, False, 2)
    saved = outcome.tensors()
    assert all(torch.equal(p, saved[f"model.{name}"]) for name, p in loaded.model.named_parameters())
    from wanma.data.opening import open_dataset

    batch = open_dataset(loaded.config.data, loaded.config.train).validation_batch([0])
    logits = loaded(*batch.inputs)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    assert loss == pytest.approx(outcome.validation_losses[-1], rel=1e-6)


def test_averaged_weights_an_earlier_step_and_a_damaged_newest(tmp_path: Path) -> None:
    outcome = trained(tmp_path, SMALL_DECODER, weight_average=0.5)
    loaded = wanma.load(outcome.directory)
    assert loaded.averaged
    name, weight = next(iter(loaded.model.named_parameters()))
    assert torch.equal(weight, outcome.tensors()[f"average.{name}"])
    plain = wanma.load(outcome.directory, averaged=False, step=1)
    assert plain.step == 1
    assert torch.equal(plain.model.get_parameter(name), outcome.tensors(1)[f"model.{name}"])
    shutil.copytree(loaded.checkpoint, outcome.directory / "checkpoints" / "step-00000003")
    (outcome.directory / "checkpoints" / "step-00000003" / "rank-00000.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="falling back .*step-00000002"):
        assert wanma.load(outcome.directory).step == 2
    with pytest.raises(WanmaError, match="step-00000003 is damaged"):
        wanma.load(outcome.directory, step=3)
    with pytest.raises(WanmaError, match="there is no run in"):
        wanma.load(tmp_path / "nothing")


def test_adapters_are_in_the_weights_of_plain_layers(tmp_path: Path) -> None:
    keys = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ["*.attention.query"]}
    outcome = trained(tmp_path, {**SMALL_DECODER, **keys})
    model, saved = wanma.load(outcome.directory).model, outcome.tensors()
    at = "layers.0.attention.query"
    change = saved[f"model.{at}.lora_b"] @ saved[f"model.{at}.lora_a"] * 3.0
    assert change.abs().max() > 0
    assert torch.allclose(
        model.get_parameter(f"{at}.weight"), saved[f"model.{at}.weight"] + change, atol=1e-7
    )
    assert not any("lora" in name for name in model.state_dict())


def test_frozen_weights_of_16_bits_have_as_many_bits_as_the_others(tmp_path: Path) -> None:
    keys = {"lora_rank": 2, "lora_targets": ["*.attention.query"]}
    job = {"precision": "bf16"}
    outcome = trained(tmp_path, {**SMALL_DECODER, **keys}, Plan(micro_batch=2, precision="bf16"), **job)
    assert outcome.tensors()["model.layers.0.attention.query.weight"].dtype == torch.bfloat16
    loaded = wanma.load(outcome.directory)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


def test_wanmas_vision_models_need_no_data(tmp_path: Path) -> None:
    import numpy as np

    images = tmp_path / "images.npz"
    rows = np.random.default_rng(1).integers(0, 255, (12, 8, 12, 3), dtype=np.uint8)
    np.savez(images, images=rows, labels=np.arange(12) % 3)
    outcome = trained(tmp_path, {"family": "convnet"}, data={"images": str(images)})
    images.unlink()
    loaded = wanma.load(outcome.directory)
    assert loaded.tokenizer is None
    assert loaded(torch.zeros(2, 3, 8, 12)).shape == (2, 3)
    with pytest.raises(WanmaError, match=r"trained ConvNet without text"):
        loaded.sample("a")


class Fixed(nn.Module):
    """A model of one's own that takes no arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.norm(x))
        return result


class Sized(Fixed):
    """One that takes one."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), 1.0, 2.0]), torch.tensor([float(index)])


def squared(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output - targets) ** 2


def own(folder: Path, model: nn.Module) -> Path:
    """A run as `wanma.train` leaves it that was given `model`."""
    kind = type(model)
    job = {
        "model": {"factory": f"{kind.__module__}:{kind.__qualname__}", "batch_norm_group": 4},
        "train": {"steps": 2, "global_batch": 4},
    }
    objects = {"model": model, "data": Points(), "loss": squared}
    outcome = run_here(folder, job, Plan(micro_batch=4), objects)
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(job)))
    return folder


def test_a_module_of_ones_own_comes_back_as_it_is(tmp_path: Path) -> None:
    run = own(tmp_path / "fixed", Fixed())
    loaded = wanma.load(run)
    assert type(loaded.model) is Fixed
    assert type(loaded.model.norm) is nn.BatchNorm1d
    saved = Outcome(run).tensors()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    assert loaded.model.norm.running_mean.abs().max() > 0
    other = Fixed()
    other.linear = nn.Linear(4, 1)
    with pytest.raises(WanmaError, match=r"linear\.weight: .*\(1, 4\) .*\(1, 3\)"):
        wanma.load(run, model=other)


def test_the_product_of_a_factory_is_made_again_with_the_jobs_arguments(tmp_path: Path) -> None:
    job = {
        "model": {"factory": f"{__name__}:Sized", "arguments": {"scale": 3.0}, "batch_norm_group": 4},
        "train": {"steps": 2, "global_batch": 4},
    }
    outcome = run_here(tmp_path, job, Plan(micro_batch=4), {"data": Points(), "loss": squared})
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(job)))
    loaded = wanma.load(tmp_path)
    assert loaded.model.scale == 3.0
    assert torch.equal(loaded.model.linear.weight, outcome.tensors()["model.linear.weight"])


def test_a_module_made_with_arguments_is_to_be_given(tmp_path: Path) -> None:
    run = own(tmp_path / "sized", Sized(3.0))
    with pytest.raises(WanmaError, match=r"not recorded\n  give the module"):
        wanma.load(run)
    model = Sized(3.0)
    assert wanma.load(run, model=model).model is model


def test_text_is_drawn_by_temperature_top_k_top_p_and_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trained(tmp_path, SMALL_DECODER)
    loaded = wanma.load(outcome.directory)
    greedy = loaded.sample("def ", 12, temperature=0)
    assert loaded.sample("def ", 12, top_k=1) == greedy == loaded.sample("def ", 12, top_p=1e-6)
    drawn = loaded.sample("def ", 12)
    assert drawn == loaded.sample("def ", 12, seed=1) == "".join(loaded.stream("def ", 12))
    assert drawn != loaded.sample("def ", 12, seed=2)
    both = loaded.sample(["def ", "class "], 12)
    assert both == [drawn, loaded.sample("class ", 12, seed=2)]
    with pytest.raises(WanmaError, match=r"top_p = 0: must be above 0, at most 1"):
        loaded.sample("a", top_p=0)
    capsys.readouterr()
    command = ["sample", "mine", "--runs", str(tmp_path / "runs"), "--tokens", "12"]
    assert main([*command, "--prompt", "def ", "--prompt", "class "]) == 0
    assert capsys.readouterr().out == f"def {both[0]}\n\nclass {both[1]}\n"
    assert main([*command, "--prompt", "def ", "--top-k", "1"]) == 0
    assert capsys.readouterr().out == f"def {greedy}\n"
    assert main([*command, "--prompt", "def ", "--top-p", "2"]) == 2
    assert "top_p = 2.0" in capsys.readouterr().err


def test_the_example_evaluates_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = trained(tmp_path, SMALL_DECODER)
    monkeypatch.setattr("sys.argv", ["use_model.py", str(outcome.directory)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "use_model.py"), run_name="__main__")
    told = capsys.readouterr().out.splitlines()
    assert told[-5:-3][0] == "Decoder after 2 of 2 steps"
    assert told[-4].startswith("loss of 'def add(a, b):")


def test_top_k_and_top_p_leave_the_likeliest_tokens() -> None:
    from wanma.api.checkpoints.generation import SamplingRule

    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()

    def drawn(**rule: Any) -> set[int]:
        generator = torch.Generator().manual_seed(0)
        return {SamplingRule(temperature=1.0, **rule).draw(logits, generator) for _ in range(200)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 2}
    assert drawn(top_p=0.5) == {1}
    assert drawn(top_p=0.51) == {1, 2}
    assert drawn(top_p=0.95) == {0, 1, 2, 3}
    assert drawn(top_k=3, top_p=0.9) == {1, 2, 3}
