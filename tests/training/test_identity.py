"""A run directory carries on with the model, data and loss that it began with, or says what differs."""

from __future__ import annotations

import functools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.own import Noisy, Numbers, Plain, Scaled, seeded
from support.ranks import Outcome, run_here
from wanma.data.datasets.fingerprint import dataset_fingerprint
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.training.checkpointing.code_fingerprint import code_fingerprint, same_code
from wanma.training.checkpointing.run_identity import (
    DEFAULT_CODE,
    Identity,
    check_identity,
    identity_of,
    record_returned_weights,
)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(output, targets, reduction="none")


def smoothed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, reduction="none", label_smoothing=0.1)


def objects(**changed: Any) -> dict[str, Any]:
    return {"model": seeded(Plain), "data": Numbers(), "loss": loss, **changed}


JOB = {
    "model": {"factory": "support.own:Plain"},
    "train": {"steps": 2, "global_batch": 8},
    "checkpoint": {"every_steps": 0},
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"model": seeded(Noisy)}, "another model"),
        ({"model": seeded(Plain, seed=4)}, "other initial weights than this one, and its run is finished"),
        ({"data": Numbers(seed=1)}, "other data"),
        ({"data": Numbers(size=65)}, "other data"),
        ({"loss": smoothed}, "another loss"),
    ],
    ids=["nothing", "model", "weights", "samples", "size", "loss"],
)
def test_a_run_that_has_ended_refuses_what_it_was_not_of(
    changed: dict[str, Any], told: str | None, tmp_path: Path, once: Callable[[], Path]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(once(), directory)
    if told is None:
        assert len(run_here(directory, JOB, Plan(micro_batch=8), objects()).losses) == 2
        return
    with pytest.raises(WanmaError, match=told) as error:
        run_here(directory, JOB, Plan(micro_batch=8), objects(**changed))
    assert "run_directory=" in str(error.value)
    assert "--fresh" in str(error.value)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """The directory of a run that has ended."""

    @functools.cache
    def made() -> Path:
        directory = tmp_path_factory.mktemp("identity") / "run"
        run_here(directory, JOB, Plan(micro_batch=8), objects())
        return directory

    return made


def checked(mine: Identity, saved: Identity, directory: Path, **how: Any) -> tuple[Identity, list[str]]:
    how = {"is_over": False, "is_restart": False, **how}
    return check_identity(mine, saved.state_values(), "step-2", directory, **how)


def test_an_unseeded_model_carries_on_with_a_word_and_a_seeded_one_is_refused(tmp_path: Path) -> None:
    first, second = (identity_of(seeded(Plain, seed), seeded=False) for seed in (1, 2))
    kept, notes = checked(second, first, tmp_path)
    assert kept.weights == first.weights
    assert "random weights without a seed" in notes[0]
    with pytest.raises(WanmaError, match="other initial weights"):
        checked(replace(second, seeded=True), replace(first, seeded=True), tmp_path)
    with pytest.raises(WanmaError, match="its run is finished"):
        checked(second, first, tmp_path, is_over=True)
    assert checked(second, first, tmp_path, is_over=True, is_restart=True)[1] == []


def test_weights_that_a_run_has_returned_may_come_back_to_it(tmp_path: Path) -> None:
    began, trained = identity_of(seeded(Plain, 1), seeded=True), seeded(Plain, 2)
    record_returned_weights(RunDirectory(tmp_path), trained)
    kept, notes = checked(identity_of(trained, seeded=True), began, tmp_path, is_over=True)
    assert (kept.weights, notes) == (began.weights, [])


def test_checkpoints_that_keep_no_identity_are_taken(tmp_path: Path) -> None:
    mine = identity_of(seeded(Plain), seeded=True)
    assert check_identity(
        mine, {"data_fingerprint": ""}, "step-2", tmp_path, is_over=True, is_restart=False
    ) == (mine, [])
    assert checked(Identity(loss=DEFAULT_CODE), Identity(loss=""), tmp_path)[1] == []


class WithRate(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)
        self.line = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.line(self.drop(x))
        return made


class WithResidual(WithRate):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_settings_and_the_users_own_forward_are_part_of_a_model() -> None:
    plain, other, residual = seeded(lambda: WithRate(0.1)), seeded(lambda: WithRate(0.2)), None
    residual = seeded(lambda: WithResidual(0.1))
    found = [identity_of(model, seeded=True).model for model in (plain, other, residual)]
    assert len(set(found)) == 3
    assert found[0] == identity_of(seeded(lambda: WithRate(0.1)), seeded=True).model
    assert identity_of(plain.eval(), seeded=True).model == found[0]


def test_attributes_of_users_classes_are_part_of_a_model() -> None:
    one, other = (identity_of(seeded(lambda by=by: Scaled(by)), seeded=True) for by in (1.0, 2.0))
    assert one.weights == other.weights
    assert one.model != other.model


def of_factory(directory: Path, name: str = "NumpyDrawn", seed: int = 0, steps: int = 2, **more: Any) -> None:
    job = {**JOB, "model": {"factory": f"support.own:{name}", **more}}
    job["train"] = {"steps": steps, "global_batch": 8, "seed": seed}
    run_here(directory, job, Plan(micro_batch=8), {"data": Numbers()})


def test_a_factorys_model_is_known_by_what_it_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_factory(tmp_path)
    of_factory(tmp_path)  # the same again
    with pytest.raises(WanmaError, match="another model"):
        of_factory(tmp_path, "Plain")
    for steps in (2, 3):  # over, and not yet
        with pytest.raises(WanmaError, match=r"train\.seed was 0, and is 1"):
            of_factory(tmp_path, seed=1, steps=steps)
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda line: nn.init.normal_(line.weight))
    with pytest.raises(WanmaError, match="with other initial weights"):
        of_factory(tmp_path, steps=4)


def test_arguments_of_a_factory_are_part_of_its_model(tmp_path: Path) -> None:
    of_factory(tmp_path, "Scaled")
    with pytest.raises(WanmaError, match="another model"):
        of_factory(tmp_path, "Scaled", arguments={"scale": 2.0})


def scaled(by: float) -> Any:
    return lambda output, targets: by * (output - targets) ** 2


def test_a_loss_is_known_by_its_code_constants_and_closure() -> None:
    one = code_fingerprint(scaled(1.0))
    assert one == code_fingerprint(scaled(1.0))
    assert one != code_fingerprint(scaled(2.0))
    assert code_fingerprint(loss) != code_fingerprint(smoothed)
    ignoring = [nn.CrossEntropyLoss(ignore_index=index, reduction="none") for index in (1, 2)]
    assert code_fingerprint(ignoring[0]) != code_fingerprint(ignoring[1])
    weights = [functools.partial(F.cross_entropy, weight=torch.tensor([1.0, w])) for w in (1.0, 2.0)]
    assert code_fingerprint(weights[0]) != code_fingerprint(weights[1])
    assert same_code("3.11:a", "3.12:b")  # another Python compiles to other code
    assert same_code("3.11/2:a", "3.11/3:b")  # another version of wanma hashes other texts
    assert not same_code("3.11:a", "3.11:b")
    assert not same_code(DEFAULT_CODE, "3.11:b")


@pytest.mark.full
def test_fingerprints_are_the_same_in_another_process_with_other_hashes_of_strings() -> None:
    program = (
        "from test_identity import *\n"
        "named = lambda o, t: o if 'a' in {'a', 'b', 'c'} else t\n"
        "print(code_fingerprint(named), code_fingerprint(loss), identity_of(seeded(Noisy), seeded=True),"
        "dataset_fingerprint(Numbers(), read))"
    )
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    told = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}\n{program}"],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(told) == 1


def read(dataset: Any, row: int) -> Any:
    return dataset[row]


class Drawn(Numbers):
    """Augments its samples, by three generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.randn(8) + random.random(), target


def test_a_dataset_is_known_by_its_samples_unless_it_draws_them() -> None:
    before = torch.get_rng_state()
    assert dataset_fingerprint(Drawn(), read) == dataset_fingerprint(Drawn(seed=1), read)
    assert torch.equal(torch.get_rng_state(), before)
    assert dataset_fingerprint(Drawn(size=63), read) != dataset_fingerprint(Drawn(), read)
    assert dataset_fingerprint(Numbers(), read) != dataset_fingerprint(Numbers(seed=1), read)
    nearly = Numbers()
    nearly.inputs *= 1 + 1e-7  # another machine's last digit
    assert dataset_fingerprint(nearly, read) == dataset_fingerprint(Numbers(), read)


def test_changes_are_accepted_where_the_job_says_so_until_the_run_is_over(tmp_path: Path) -> None:
    models = (seeded(functools.partial(WithRate, rate)) for rate in (0.1, 0.2))
    before, now = (identity_of(model, seeded=True) for model in models)
    kept, notes = checked(now, before, tmp_path, accepts_changes=True)
    assert kept == now
    assert "another model than this one" in notes[0]
    for how in ({}, {"accepts_changes": True, "is_over": True}):
        with pytest.raises(WanmaError, match="another model"):
            checked(now, before, tmp_path, **how)


def test_a_run_goes_on_in_its_order_of_the_data_or_says_what_differs(tmp_path: Path) -> None:
    def order(*sources: Any, shuffle: Shuffle | None = None) -> Identity:
        made = SampleOrder.of_mixture([9] * len(sources), sources, shuffle or Shuffle(), 1)
        return Identity(order=made.identity())

    def values(saved: Identity, samples: int) -> dict[str, Any]:
        return {**saved.state_values(), "samples": samples}

    def check(now: Identity, saved: Identity, samples: int = 50, **how: Any) -> tuple[Identity, list[str]]:
        how = {"is_over": False, "is_restart": False, **how}
        return check_identity(now, values(saved, samples), "step-2", tmp_path, **how)

    before = order([(0, 1.0), (50, 0.0)], 1.0)
    later = order([(0, 1.0), (50, 2.0)], 1.0)
    assert check(later, before) == (later, [])
    with pytest.raises(WanmaError, match=r"data\.sources"):
        check(later, before, 51)
    blocks = order([(0, 1.0), (50, 0.0)], 1.0, shuffle=Shuffle("block", 8, 4))
    with pytest.raises(WanmaError, match="was full, and is block of 8 ") as refused:
        check(blocks, before)
    assert "checkpoint.resume = 'changed'" in str(refused.value)
    kept, notes = check(blocks, before, accepts_changes=True)
    assert kept == blocks
    assert "resuming anyway" in notes[0]
    assert check(blocks, Identity()) == (blocks, [])  # a checkpoint of an older version
    assert check(Identity(), blocks) == (blocks, [])  # data with an order of their own


def test_a_resumed_run_in_another_order_is_refused(tmp_path: Path) -> None:
    def run(steps: int, **data: Any) -> Any:
        job = {**JOB, "train": {"steps": steps, "global_batch": 8}, "data": data}
        return run_here(tmp_path / "run", job, Plan(micro_batch=8), objects())

    blocks = {"shuffle": "block", "block_samples": 8, "window_blocks": 2}
    run(2, **blocks)
    with pytest.raises(WanmaError, match=r"was block of 8 .* 2 in .* is full"):
        run(4)
    with pytest.raises(WanmaError, match=r"and is block of 9 samples"):
        run(4, **{**blocks, "block_samples": 9})
    assert len(run(4, **blocks).losses) == 4


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "learning_rate", 0.5),
        ("train", "betas", [0.5, 0.5]),
        ("train", "gradient_clip", 0.25),
        ("train", "precision", "bf16"),
        ("train", "schedule", "constant"),
        ("train", "weight_average", 0.5),
        ("train", "steps", 1),
        ("data", "validation_fraction", 0.5),
        ("parallel", "compression", "fp16"),
        ("checkpoint", "start_from", "/nowhere"),
    ],
)
def test_a_complete_run_refuses_settings_that_it_was_not_trained_with(
    section: str, key: str, value: Any, tmp_path: Path, once: Callable[[], Path]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(once(), directory)
    job = {**JOB, section: {**JOB.get(section, {}), key: value}}
    with pytest.raises(WanmaError, match=rf"{section}\.{key} ") as refused:
        run_here(directory, job, Plan(micro_batch=8), objects())
    for way_out in ("--fresh", "run_directory=", "checkpoint.start_from"):
        assert way_out in str(refused.value)


def test_a_run_goes_on_with_another_end_and_validation_and_says_what_its_schedule_does(
    tmp_path: Path, once: Callable[[], Path]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(once(), directory)
    job = {**JOB, "train": {**JOB["train"], "steps": 4, "validate_every_steps": 1}}
    assert len(run_here(directory, job, Plan(micro_batch=8), objects()).losses) == 4
    (note,) = [
        event for event in Outcome(directory).events if "train.steps was 2, and is 4" in event.get("text", "")
    ]
    assert note["level"] == "warning"


def test_a_run_with_steps_left_goes_on_with_another_schedule_but_not_another_optimizer(
    tmp_path: Path, once: Callable[[], Path]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(once(), directory)

    def run(steps: int, resume: Any = True, **train: Any) -> Any:
        job = {**JOB, "train": {**JOB["train"], "steps": steps, **train}}
        job["checkpoint"] = {"every_steps": 0, "resume": resume}
        return run_here(directory, job, Plan(micro_batch=8), objects())

    assert len(run(3, schedule="constant").losses) == 3
    with pytest.raises(WanmaError, match=r"train\.learning_rate was 0\.001, and is 0\.5"):
        run(4, schedule="constant", learning_rate=0.5)
    changed = run(4, "changed", schedule="constant", learning_rate=0.5)
    assert changed.steps[-1]["learning_rate"] == 0.5
    assert any(
        "train.learning_rate was 0.001" in event.get("text", "") for event in Outcome(directory).events
    )
    with pytest.raises(WanmaError, match=r"train\.learning_rate was 0\.5, and is 0\.001"):
        run(5, schedule="constant")  # the change is recorded


def test_the_users_optimizer_and_schedule_are_part_of_a_run(tmp_path: Path) -> None:
    def run(momentum: float, end: float, steps: int = 2) -> Any:
        given = objects(
            optimizer=functools.partial(torch.optim.SGD, momentum=momentum), schedule=lambda step: end**step
        )
        job = {**JOB, "train": {"steps": steps, "global_batch": 8}}
        return run_here(tmp_path, job, Plan(micro_batch=8), given)

    run(0.5, 0.5)
    run(0.5, 0.5)
    with pytest.raises(WanmaError, match="another optimizer"):
        run(0.6, 0.5, steps=3)
    with pytest.raises(WanmaError, match="another schedule"):
        run(0.5, 0.6)
    assert len(run(0.5, 0.6, steps=3).losses) == 3


def test_the_loss_of_wanma_is_another_than_one_of_ones_own(tmp_path: Path, once: Callable[[], Path]) -> None:
    directory = tmp_path / "run"
    shutil.copytree(once(), directory)
    given = {name: one for name, one in objects().items() if name != "loss"}
    with pytest.raises(WanmaError, match="another loss"):
        run_here(directory, JOB, Plan(micro_batch=8), given)


DECODER = {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "feed_forward": 16}
MIXTURE = {"experts": 2, "experts_per_token": 1, "expert_feed_forward": 16}


@pytest.mark.parametrize(
    ("model", "changed", "named"),
    [
        ({}, {"heads": 4, "kv_heads": 4}, "heads"),
        ({}, {"rope_theta": 500.0}, "rope_theta"),
        ({}, {"dropout": 0.1}, "dropout"),
        ({"lora_rank": 2}, {"lora_alpha": 1.0}, "lora_alpha"),
        (MIXTURE, {"router": "sigmoid"}, "router"),
        (MIXTURE, {"experts_per_token": 2}, "experts_per_token"),
        (MIXTURE, {"capacity_factor": 1.0}, "capacity_factor"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_change_no_shape_are_another_model(
    model: dict[str, Any], changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)

    def run(name: str, steps: int, changes: dict[str, Any], **checkpoint: Any) -> Any:
        job = {
            "model": {**DECODER, **model, **changes},
            "data": {"text": [str(text)], "sequence_length": 8, "cache": str(tmp_path / "cache")},
            "train": {"steps": steps, "global_batch": 2},
            "checkpoint": {"every_steps": 0, **checkpoint},
        }
        return run_here(tmp_path / name, job, Plan(micro_batch=2))

    run("run", 1, {})
    with pytest.raises(WanmaError, match=rf"model\.{named} was ") as refused:
        run("run", 2, changed)
    assert "checkpoint.resume = 'changed'" in str(refused.value)
    assert "checkpoint.start_from" in str(refused.value)
    run("other", 1, changed, start_from=str(tmp_path / "run" / "checkpoints" / "step-00000001"))
    warned = [
        event["text"] for event in Outcome(tmp_path / "other").events if event.get("level") == "warning"
    ]
    assert any(f"model.{named} was" in text for text in warned)
    run("run", 2, changed, resume="changed")


def test_attributes_of_library_modules_and_nested_ones_are_part_of_a_model() -> None:
    def of(**changes: Any) -> str:
        how = {
            "heads": 2,
            "norm_first": False,
            "sizes": (1, 2),
            "scale": 1.0,
            "kind": torch.float32,
            **changes,
        }

        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(
                    8, how["heads"], 8, batch_first=True, norm_first=how["norm_first"]
                )
                self.config = {"sizes": how["sizes"], "kind": how["kind"]}
                self._scale = how["scale"]
                self.offsets = [torch.zeros(1)]  # state and no setting

            def forward(self, x: Tensor) -> Tensor:
                made: Tensor = self.layer(x) * self._scale
                return made

        return identity_of(seeded(Nested), seeded=True).model

    changes = [{"heads": 4}, {"norm_first": True}, {"sizes": (1, 3)}, {"scale": 2.0}, {"kind": torch.float64}]
    assert len({of(), *(of(**change) for change in changes)}) == 1 + len(changes)
    assert of() == of()
