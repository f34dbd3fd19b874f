"""wanma launch: the scripts of other libraries, as their users have them for torchrun."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import wanma
from support.command import Desk, Ran
from support.peer_environments import DEEPSPEED_VARIABLES, PEERS

REPOSITORY = Path(__file__).parents[2]
SOURCE = Path(wanma.__file__).parents[1]

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.exists(), reason="needs Accelerate, DeepSpeed and others: make peers"),
]


def launch(folder: Path, script: str, **environment: str) -> Ran:
    """Run a script of tests/scripts on two ranks, in the environment of the peers."""
    desk = Desk(folder, modules=folder)
    path = REPOSITORY / "tests" / "scripts" / f"{script}.py"
    command = [str(PEERS), "-m", "wanma", "launch", "--ranks", "2", str(path)]
    places = os.pathsep.join([str(SOURCE), str(folder)])
    ran = desk.start_program(command, PYTHONPATH=places, HF_HUB_OFFLINE="1", **environment).end(240)
    ran.check()
    assert "finished" in desk.call("runs").out
    return ran


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("trainer", "rank {} of 2: 2 steps, DistributedDataParallel"),
        # The trainer's loop is Accelerate's.
        ("accelerate_loop", "rank {} of 2: 4 steps, DistributedDataParallel, loss 0."),
        ("fabric_loop", "rank {} of 2: 4 steps, loss 0."),
        ("trl_loop", "rank {} of 2: 2 steps"),
    ],
)
def test_a_script_of_a_peer_runs_unchanged(tmp_path: Path, script: str, said: str) -> None:
    ran = launch(tmp_path, script)
    for rank in (0, 1):
        assert f"[rank {rank}] {said.format(rank)}" in ran.out, ran.out


def test_deepspeed_trains_under_each_stage_of_zero_as_one_process_does(tmp_path: Path) -> None:
    ran = launch(tmp_path, "deepspeed_loop", **DEEPSPEED_VARIABLES)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = []
    for batch in torch.randn(4, 16, 8):
        loss = mse_loss(model(batch), batch.sum(dim=1, keepdim=True))
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # DeepSpeed's default
        optimizer.step()
    found = re.findall(r"^\[rank (\d)\] rank \1 of 2: ZeRO (\d), losses (.*)$", ran.out, re.MULTILINE)
    assert sorted(place for *place, _ in found) == [[rank, stage] for rank in "01" for stage in "123"]
    for _, stage, text in found:
        assert [float(word) for word in text.split()] == pytest.approx(expected, abs=2e-5), stage
