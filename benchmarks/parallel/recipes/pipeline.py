"""Pipeline parallelism in plain torch.

torchtitan 0.2.2, distributed/pipeline_parallel.py: `generate_llm_fqn_per_model_part` (cuts by count),
`pipeline_module_split` (stages that lack the other stages' modules), `build_pipeline_schedule`; train.py,
`forward_backward_step`; the norm over the stages from distributed/utils.py.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from benchmarks.parallel.axes import even_cuts
from benchmarks.parallel.recipes.common import clip, loss_share
from benchmarks.workload import Workload, arguments

SCHEDULES = {"1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    group = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",)).get_group("pp")
    kind = get_schedule_class(SCHEDULES[work.parallel.schedule])
    is_single = issubclass(kind, PipelineScheduleSingle)
    count = ranks if is_single else 2 * ranks
    mine = {"1f1b": [rank], "interleaved_1f1b": [rank, rank + ranks], "zbv": [rank, count - 1 - rank]}
    numbers = mine[work.parallel.schedule]
    cuts = even_cuts(len(work.model.get_submodule("layers")), count)  # type: ignore[arg-type]  # a ModuleDict
    parts = [stage_module(work.model, number, cuts) for number in numbers]
    stages = [
        PipelineStage(part, number, count, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    assert work.parallel.micro_batch is not None
    tokens = 0

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_share(logits, targets, tokens)

    schedule: Any = kind(
        stages[0] if is_single else stages,
        n_microbatches=work.batch // work.parallel.micro_batch,
        loss_fn=loss_of,
        scale_grads=False,
    )
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = work.adamw(parameters)
    for inputs, targets in work.loader(0, 1):
        tokens = targets.numel()
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if 0 in numbers else []),
            target=targets if count - 1 in numbers else None,
            losses=losses,
            return_outputs=False,
        )
        clip([parameters], work.train.gradient_clip, group)
        optimizer.step()
        work.step_done(torch.stack(losses).sum() if losses else torch.zeros(()))
    work.finish(divisor=1, optimizer=type(optimizer).__name__, cuts=cuts)


def stage_module(model: nn.Module, number: int, cuts: tuple[int, ...]) -> nn.Module:
    """Return a copy of the model without the modules of other stages."""
    part: Any = copy.deepcopy(model)
    bounds = (0, *cuts, len(part.layers))
    for name in list(part.layers):
        if int(name) not in range(bounds[number], bounds[number + 1]):
            del part.layers[name]
    if number > 0:
        part.embedding = None
    if number < len(cuts):
        part.norm = part.head = None
    return part  # type: ignore[no-any-return]  # Any for its children


if __name__ == "__main__":
    main()
