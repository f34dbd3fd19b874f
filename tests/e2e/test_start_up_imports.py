"""Modules that a start waits for: replicas of an eager model import nothing that splits or compiles."""

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
    "override", ["parallel.dp_replicate=2", pytest.param("parallel.tp=2", marks=pytest.mark.full)]
)
def test_replicas_import_nothing_that_splits_or_compiles(desk: Desk, tmp_path: Path, override: str) -> None:
    found = tmp_path / "found"
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(modules=UNUSED_MODULES, file=str(found)))
    sizes = ("parallel.dp_replicate=1", override, "train.steps=2")
    command = ("train", "text.toml", "--run-dir", tmp_path.name, *sizes)
    ran = desk.start(*command, PYTHONPATH=str(tmp_path)).end()
    ran.check()
    text = found.read_text() if found.exists() else ""
    if override.startswith("parallel.tp"):
        assert "torch.distributed.tensor" in text
    else:
        assert text == ""
