"""wanma.train: a whole job from Python with one's own model, data and loss, as a user's script runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import wanma
from support.own import Numbers, Plain, seeded

MODULE = """\
import torch
from torch import nn

class Line(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 1)
        self.third = nn.Linear(4, 4, bias=False)
        if tied:
            self.third.weight = self.first.weight
    def forward(self, x):
        return self.second(self.third(self.first(x)))

class Points:
    def __init__(self, size=64):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]
"""

JOB = {
    "train": {"steps": 30, "global_batch": 8, "learning_rate": 3e-2, "weight_decay": 0.0},
    "parallel": {"dp_shard": 2},
    "observe": {"console": "quiet"},
}


def run(folder: Path, body: str, *, main: bool = False) -> subprocess.CompletedProcess[str]:
    """A script of `body`, which may print one line of JSON; its classes are its own if `main`.

    It has no `if __name__ == "__main__":`, because ranks do not run it.
    """
    (folder / "mine").mkdir(exist_ok=True)
    script = folder / "mine" / "script.py"
    classes = MODULE if main else "from own_classes import Line, Points"
    (folder / "mine" / "own_classes.py").write_text(MODULE)
    script.write_text(
        f"import copy, json, torch, wanma\n{classes}\nJOB = {JOB!r}\ntorch.manual_seed(1)\n{body.strip()}\n"
    )
    # From another folder than the script's: what it imports must still be found in the ranks.
    command = [sys.executable, str(script)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


def answer(result: subprocess.CompletedProcess[str]) -> Any:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("calls", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_trained_weights_end_in_the_users_module_and_a_second_call_carries_on(
    tmp_path: Path, calls: int
) -> None:
    """A third call finds the run complete."""
    body = """
model, data = Line(), Points()
before = copy.deepcopy(model.state_dict())
def loss(out, targets):
    return (out - targets).square()
def mean():
    with torch.no_grad():
        return loss(model(data.x), data.y).mean().item()
first = mean()
result = wanma.train(JOB, model=model, data=data, loss=loss, run_directory="run")
middle = mean()
same = all(torch.equal(t, result.weights()[n]) for n, t in model.state_dict().items())
longer = {**JOB, "train": {**JOB["train"], "steps": 60}}
others = [
    wanma.train(longer, model=model, data=data, loss=loss, run_directory="run") for _ in range(CALLS - 1)
]
print(json.dumps([first, middle, mean(), same, result.exit_code, [other.exit_code for other in others],
                  type(model).__name__, model.training]))
""".replace("CALLS", str(calls))
    first, middle, last, same, code, others, kind, training = answer(run(tmp_path, body))
    assert last < middle < first / 4
    assert same
    assert (code, others) == (0, [0] * (calls - 1))
    assert (kind, training) == ("Line", True)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 61))
    assert (tmp_path / "run" / "report.html").exists()


def test_a_run_stopped_before_its_first_checkpoint_leaves_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wanma.api.train.train_job", lambda *_, **__: 130)
    model = seeded(Plain)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = wanma.train(JOB, model=model, data=Numbers(), run_directory=tmp_path / "run")
    assert result.exit_code == 130
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.full
def test_everything_may_be_defined_in_the_script_itself_and_the_loss_be_a_lambda(tmp_path: Path) -> None:
    body = """
model = Line(tied=True)
result = wanma.train(JOB, model=model, data=(Points(), Points(16)), run_directory="run",
                     loss=lambda out, targets: (out - targets).abs())
tied = model.first.weight is model.third.weight
equal = torch.equal(model.first.weight, result.weights()["first.weight"])
print(json.dumps([tied, equal, sorted(result.weights()), result.exit_code]))
"""
    tied, equal, names, code = answer(run(tmp_path, body, main=True))
    assert (tied, equal, code) == (True, True, 0)
    assert names == ["first.weight", "second.bias", "second.weight"]  # one copy of the tied weight


def test_what_cannot_travel_is_named_before_anything_starts(tmp_path: Path) -> None:
    model: Any = seeded(Plain)
    with Path(os.devnull).open("w") as model.log, pytest.raises(wanma.WanmaError) as refused:
        wanma.train(JOB, model=model, data=Numbers(), run_directory=tmp_path / "run")
    assert "model = Plain" in str(refused.value)
    assert "model.factory" in refused.value.hint
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.full
def test_a_mean_loss_is_one_clear_error_of_a_rank(tmp_path: Path) -> None:
    body = """
try:
    wanma.train(JOB, model=Line(), data=Points(), run_directory="run",
                loss=lambda out, targets: (out - targets).square().mean())
except wanma.WanmaError as error:
    print(json.dumps(str(error)))
"""
    message = answer(run(tmp_path, body, main=True))
    assert "the loss has shape ()" in message
    assert "reduction='none'" in message
    assert "Traceback" not in message


def test_a_mistake_in_the_job_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(wanma.JobError, match="trian"):
        wanma.train({**JOB, "trian": {}}, model=seeded(Plain), data=Numbers(), run_directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
