"""Tensor parallelism in plain torch, with and without sequence parallelism, loss parallel in both.

With it: torchtitan 0.2.2, models/llama3/infra/parallelize.py, `apply_tp`. Without: its main branch,
models/qwen3/parallelize.py, `apply_non_moe_tp` with enable_sp=False, but for one thing that is in favor of
this recipe: the residual stream is a plain tensor and no DTensor, whose every operation costs more.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.parallel.recipes.common import clip, loss_share
from benchmarks.workload import Workload, arguments


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    split(work.model, mesh, sequence=work.parallel.sequence_parallel)
    optimizer = work.adamw(work.model.parameters())
    for inputs, targets in work.loader(0, 1):
        optimizer.zero_grad()
        with loss_parallel():
            loss = loss_share(work.model(inputs), targets, targets.numel())
            loss.backward()
        clip([work.model.parameters()], work.train.gradient_clip)
        optimizer.step()
        work.step_done(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    work.finish(optimizer=type(optimizer).__name__)


def split(model: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Apply the tensor-parallel plan to wanma's decoder, whose modules have other names than torchtitan's."""
    residual = Shard(1) if sequence else Replicate()
    norm: ParallelStyle = SequenceParallel() if sequence else WholeOnEveryRank()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
            "norm": norm,
            "head": ColwiseParallel(input_layouts=residual, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.get_submodule("layers").children():
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": norm,
                "attention": PrepareModuleInput(
                    input_layouts=(residual, None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.output": RowwiseParallel(output_layouts=residual),
                "feed_forward_norm": norm,
                "feed_forward": PrepareModuleInput(
                    input_layouts=(residual,), desired_input_layouts=(Replicate(),)
                ),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=residual),
            },
        )


class WholeOnEveryRank(ParallelStyle):
    """Style of torchtitan's NoParallel (distributed/__init__.py): parameters become DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)

    @staticmethod
    def _enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)

    @staticmethod
    def _leave(_: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:  # noqa: ARG004  # torch's hook
        return outputs.to_local()


if __name__ == "__main__":
    main()
