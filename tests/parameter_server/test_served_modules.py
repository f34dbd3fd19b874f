"""A user's module and loss on parameter servers: the numbers of one process, or one error."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.command import Desk, Training
from support.server_jobs import ASYNCHRONOUS, DLRM, GPT
from support.server_runs import Run
from wanma.checkpoint.load.reader import find_newest_valid
from wanma.job.errors import WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.training.loop.server_training import train_with_servers
from wanma.training.loop.train_request import TrainRequest

OWN = """\
[model]
factory = "support.served:Composed"
loss = "support.served:smoothed"
batch_norm_group = 4
[data]
factory = "support.own:Numbers"
validation_fraction = 0.25
[train]
steps = 8
global_batch = 8
learning_rate = 1e-2
epsilon = 1e-2  # AdamW makes rounding of gradients near zero as large as any other
schedule_factory = "support.served:halved"
validate_every_steps = 4
[checkpoint]
every_steps = 4
[observe]
log_every_steps = 1
console = "plain"
"""
GPT_END = """\
global_batch = 8
[observe]
console = "plain"
"""
DLRM_END = """\
steps = 6
global_batch = 32
embedding_optimizer = "adagrad"
optimizer = "sgd"
[observe]
console = "plain"
"""
SERVED = ("servers.count=2", "parallel.dp_replicate=2", "parallel.micro_batch=4")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("served"), Path(__file__).parents[1])
    jobs = {"own": OWN, "gpt": GPT + GPT_END, "dlrm": DLRM + DLRM_END}
    for name, text in jobs.items():
        (desk.folder / f"{name}.toml").write_text(text)
    return desk


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of weights, buffers and optimizer state; fresh state counts as none."""
    for name in one.keys() ^ other.keys():
        assert name.startswith("optimizer.never"), name
        assert not one.get(name, other.get(name)).any(), name  # type: ignore[union-attr]
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one.keys() & other.keys())


@pytest.mark.parametrize(
    "keys",
    [
        SERVED,
        pytest.param(("servers.count=3", "servers.replicas=2", *SERVED[1:]), marks=pytest.mark.full),
        pytest.param(("servers.count=1", "parallel.micro_batch=8"), marks=pytest.mark.full),
    ],
)
def test_synchronous_servers_train_a_user_s_module_with_its_loss_as_one_process(
    desk: Desk, keys: tuple[str, ...]
) -> None:
    alone = desk.trained("own", "own-alone", "parallel.micro_batch=8")
    served = desk.trained("own", f"own-{'-'.join(keys).replace('.', '-').replace('=', '-')}", *keys)
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=1e-6)
    assert np.allclose(served.validation_losses, alone.validation_losses, rtol=0, atol=1e-6)
    state = served.state()
    assert largest_difference(state, alone.state()) <= 1e-6
    assert 0 < state["optimizer.rare.step"] < 8, "it had no gradient in some steps"
    assert state["model.norm.running_mean"].any()
    untrained = desk.training("own-alone").state(4)
    assert torch.equal(state["model.frozen.weight"], untrained["model.frozen.weight"])


def test_a_checkpoint_of_a_user_s_module_loads_on_servers_and_without(desk: Desk) -> None:
    whole = desk.trained("own", "own-alone", "parallel.micro_batch=8")
    before = ("train.steps=4", "train.schedule_factory=support.served:halved_in_8")
    for first, then in ((SERVED, ("parallel.micro_batch=8",)), (("parallel.micro_batch=8",), SERVED)):
        name = f"own-resumed-{len(first)}"
        desk.run("train", "own.toml", "--run-dir", name, *before, *first).check()
        desk.run(
            "train", "own.toml", "--run-dir", name, before[1], *then, "checkpoint.resume=changed"
        ).check()
        assert largest_difference(desk.training(name).state(), whole.state()) <= 1e-6


@pytest.mark.parametrize(
    ("job", "alone_keys"), [("own", ()), ("gpt", ()), ("dlrm", ("parallel.embedding=row_wise",))]
)
def test_synchronous_servers_train_in_bf16_as_one_process(
    desk: Desk, job: str, alone_keys: tuple[str, ...]
) -> None:
    keys = ("train.precision=bf16", f"parallel.micro_batch={16 if job == 'dlrm' else 4}")
    alone = desk.trained(job, f"{job}-bf16-alone", *keys, *alone_keys)
    served = desk.trained(job, f"{job}-bf16", *SERVED[:2], *keys)
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=1e-6)
    assert largest_difference(served.state(), alone.state()) <= 1e-6


@pytest.mark.parametrize(
    ("job", "frozen"),
    [("own", "train.parameter_groups=[{match='blocks.*', frozen=true}]"), ("gpt", "model.lora_rank=2")],
)
def test_synchronous_servers_train_beside_frozen_parameters_as_one_process(
    desk: Desk, job: str, frozen: str
) -> None:
    alone = desk.trained(job, f"{job}-frozen-alone", frozen, "parallel.micro_batch=8")
    served = desk.trained(job, f"{job}-frozen", frozen, *SERVED)
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=1e-6)
    assert largest_difference(served.state(), alone.state()) <= 1e-6


def test_servers_follow_a_schedule_of_the_user_s(desk: Desk) -> None:
    keys = ("servers.count=1", "train.schedule_factory=support.served:halved", "train.steps=2")
    training = desk.trained("gpt", "gpt-schedule", *keys)
    rates = [step["learning_rate"] for step in training.metrics]
    assert rates == pytest.approx([1e-2, 1e-2 * 0.5**0.5])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_asynchronous_workers_train_a_user_s_module_with_its_loss(desk: Desk, precision: str) -> None:
    keys = (*SERVED[:2], *ASYNCHRONOUS, f"train.precision={precision}", "train.steps=60")
    training = desk.trained("own", f"own-asynchronous-{precision}", *keys)
    losses = training.validation_losses
    assert len(training.metrics) == 60
    assert losses[-1] < losses[0]
    assert training.state()["model.norm.running_mean"].any()


def test_a_module_passed_in_python_trains_on_servers_with_its_loss(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import json, torch, wanma
from support.own import Numbers
from support.served import Composed

def trained(name, **sections):
    torch.manual_seed(3)
    model = Composed()
    def loss(output, targets):
        penalty = model.last.weight.square().sum()
        return torch.nn.functional.cross_entropy(output, targets, reduction="none") + 0.1 * penalty
    job = {
        "model": {"batch_norm_group": 4},
        "data": {"validation_fraction": 0.25},
        "train": {"steps": 4, "global_batch": 8, "learning_rate": 0.1, "optimizer": "sgd",
                  "validate_every_steps": 2},
        "parallel": {"micro_batch": 8},
        "observe": {"console": "quiet"},
        **sections,
    }
    schedule = lambda step: 0.9 ** step
    wanma.train(job, model=model, data=Numbers(), loss=loss, schedule=schedule,
                run_directory=name)

if __name__ == "__main__":
    trained("alone")
    trained("served", servers={"count": 2}, parallel={"micro_batch": 4, "dp_replicate": 2})
""")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, check=True, timeout=240)
    alone, served = (Training(tmp_path / name) for name in ("alone", "served"))
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=1e-6)
    assert np.allclose(served.validation_losses, alone.validation_losses, rtol=0, atol=1e-6)
    assert largest_difference(served.state(), alone.state()) <= 1e-6


def request_of(model: str, *, loss: str | None = None, workers: int = 1, **sections: Any) -> TrainRequest:
    job = {
        "model": {"factory": model, "batch_norm_group": 4, **({"loss": loss} if loss else {})},
        "data": {"factory": "support.own:Numbers"},
        "train": {"steps": 3, "global_batch": 8},
        "servers": {"count": 2},
        "observe": {"console": "quiet"},
        **sections,
    }
    return TrainRequest(to_job(job), Plan(dp_replicate=workers, micro_batch=8 // workers))


@pytest.mark.parametrize(
    ("model", "loss", "workers", "text"),
    [
        ("Averaging", None, 1, "average"),
        ("Marking", None, 1, "mark was modified in a forward pass"),
        ("Clamping", None, 1, "first.weight was modified in a forward pass"),
        ("Counting", None, 1, "depends on earlier forward passes"),
        ("Hooked", None, 1, "gradient hook"),
        ("Double", None, 1, "scale: it is torch.float64"),
        ("Peeking", None, 1, "no running statistics"),
        ("Composed", "in_batch", 2, "depends on which other samples"),
        ("Composed", "in_global_batch", 2, r"wanma\.global_batch"),
    ],
)
def test_what_servers_cannot_train_right_is_refused(
    run: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    loss: str | None,
    workers: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    request = request_of(f"support.served:{model}", loss=loss and f"support.served:{loss}", workers=workers)
    clients = run(workers).clients
    with pytest.raises(WanmaError, match=text):
        train_with_servers(WorkerContext.single_process(tmp_path), request, clients[0], request)
    assert not (tmp_path / "checkpoints").exists() or find_newest_valid(tmp_path / "checkpoints") is None


def test_a_buffer_of_other_weights_is_refused(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("Shifted", ""), ("Unshifted", "buffer shift")):
        start = (
            {"checkpoint": {"start_from": str(tmp_path / "Shifted/checkpoints/step-00000003")}}
            if text
            else {}
        )
        request = request_of(f"support.served:{name}", **start)
        worker = WorkerContext.single_process(tmp_path / name)
        if not text:
            assert train_with_servers(worker, request, run().clients[0], request) == "finished"
            continue
        with pytest.raises(WanmaError, match=text):
            train_with_servers(worker, request, run().clients[0], request)


def test_one_worker_with_the_global_batch_may_compare_its_samples(
    run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = request_of("support.served:Composed", loss="support.served:in_global_batch")
    worker = WorkerContext.single_process(tmp_path)
    assert train_with_servers(worker, request, run().clients[0], request) == "finished"
