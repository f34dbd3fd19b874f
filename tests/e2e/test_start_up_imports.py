"""Modules that a start waits for, and that a supervisor keeps: nothing that splits or compiles; no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Desk

UNUSED_MODULES = {
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "wanma.parallel.data_parallel.sharded",
    "wanma.parallel.expert.expert_parallel",
    "wanma.parallel.pipeline.pipeline_runner",
    "wanma.parallel.tensor.tensor_parallel",
}
WATCH = """
import sys, traceback

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {modules}:
            with open({file!r}, "a") as file:
                print(name, [frame.name for frame in traceback.extract_stack()][-12:], file=file)

sys.meta_path.insert(0, Watch())
"""


@pytest.mark.parametrize(
    "override",
    ["parallel.dp_replicate=2", "--dry-run", pytest.param("parallel.tp=2", marks=pytest.mark.full)],
)
def test_replicas_import_nothing_that_splits_or_compiles(desk: Desk, tmp_path: Path, override: str) -> None:
    found = tmp_path / "found"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(modules=UNUSED_MODULES, file=str(found)))
    sizes = ("parallel.dp_replicate=1", override, "train.steps=2")
    command = ("train", "text.toml", "--run-dir", tmp_path.name, *sizes)
    desk.start(*command, PYTHONPATH=str(tmp_path)).end().check()
    text = found.read_text() if found.exists() else ""
    if override.startswith("parallel.tp"):
        assert "torch.distributed.tensor" in text
    else:
        assert text == ""


@pytest.mark.parametrize(
    "override",
    [
        pytest.param("train.seed=1", id="formula", marks=pytest.mark.full),
        pytest.param("model.lora_rank=2", id="traced"),
    ],
)
def test_the_supervisor_holds_no_torch_while_its_rank_trains(desk: Desk, override: str) -> None:
    training = desk.training(f"holds-{override}")
    sizes = ("parallel.dp_replicate=1", "train.steps=100000", override)
    running = desk.start("train", "text.toml", "--run-dir", training.path.name, *sizes)
    assert running.until(lambda: training.steps_begun() >= 1), running.end().text
    rank = training.rank_process(0)
    assert rank is not None
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (running.process.pid, rank)}
    running.kill_all()
    running.end()
    assert "libtorch" in maps[rank]
    assert "libtorch" not in maps[running.process.pid]
