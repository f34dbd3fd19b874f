"""The scripts that the guides walk through do what the guides say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from support.command import Desk

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str) -> str:
    ran = Desk(folder, modules=folder).start_program([sys.executable, str(EXAMPLES / name)]).end(240)
    ran.check()
    return ran.out


@pytest.mark.full
@pytest.mark.slow
def test_a_module_of_the_users_learns_its_curve(tmp_path: Path) -> None:
    off = re.search(r"sin\(2\) is off by ([\d.]+)", run(tmp_path, "custom_model.py"))
    assert float(off[1]) < 0.1


@pytest.mark.full
def test_adapters_are_trained_merged_and_loaded_by_transformers(tmp_path: Path) -> None:
    out = run(tmp_path, "finetune_lora.py")
    losses = [float(loss) for loss in re.findall(r"step +\d+/20 +loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] - 0.1
    assert "trained 16 adapter matrices" in out
    assert "LlamaForCausalLM" in out
    assert (tmp_path / "runs" / "finetune-lora" / "merged" / "model.safetensors").exists()


@pytest.mark.full
def test_two_clusters_are_compared_by_time_and_price(tmp_path: Path) -> None:
    out = run(tmp_path, "plan_cluster.py")
    runs = re.findall(r"run (\d+) h on (\d+) devices: \$([\d,]+)", out)
    assert [int(devices) for _, devices, _ in runs] == [32, 64]
    for (hours, devices, price), rate in zip(runs, (3.0, 1.5), strict=True):
        assert int(price.replace(",", "")) == pytest.approx(int(hours) * int(devices) * rate, rel=0.05)
