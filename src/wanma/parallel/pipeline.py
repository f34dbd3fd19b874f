"""Pipeline parallel: each rank keeps a run of blocks; torch's schedules drive them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from wanma.data.batch import Batch
from wanma.job.errors import JobError
from wanma.job.plan import Plan
from wanma.models.dropout import keyed_samples
from wanma.models.layout import Layout
from wanma.parallel.mesh import Grid

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def keep_stage(model: nn.Module, layout: Layout, plan: Plan, stage: int) -> None:
    """Remove from `model`, in place, what pipeline stage `stage` does not hold.

    Parameter names stay those of the whole model, so that every stage writes the same checkpoint.

    Raises:
        JobError: there are fewer blocks than stages, or tied parameters would be torn apart.
    """
    if plan.pp == 1:
        return
    if layout.blocks is None:
        raise JobError(
            f"parallel.pp = {plan.pp}: {type(model).__name__} does not declare its blocks",
            "use pp = 1, or declare a layout with the path of the repeated blocks",
        )
    if layout.tied:
        raise JobError(
            f"parallel.pp = {plan.pp}: {' and '.join(layout.tied[0])} share one tensor but lie on "
            "different pipeline stages",
            "set model.tie_embeddings = false, or pp = 1",
        )
    blocks = model.get_submodule(layout.blocks)
    assert isinstance(blocks, nn.ModuleDict)
    names = list(blocks)
    cuts = (0, *(plan.stage_cuts or even_cuts(len(names), plan.pp)), len(names))
    if len(cuts) != plan.pp + 1 or any(a >= b for a, b in pairwise(cuts)):
        raise JobError(
            f"parallel.pp = {plan.pp}: {len(names)} blocks cannot be cut into so many stages",
            f"use at most pp = {len(names)}",
        )
    kept = set(names[cuts[stage] : cuts[stage + 1]])
    for name in names:
        if name not in kept:
            del blocks[name]
    absent = (layout.first if stage > 0 else ()) + (layout.last if stage < plan.pp - 1 else ())
    for path in absent:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, None)


def even_cuts(blocks: int, stages: int) -> tuple[int, ...]:
    """First block of each stage but the first; the last stages get fewer, for they hold the head."""
    base, extra = divmod(blocks, stages)
    sizes = [base + (stage < extra) for stage in range(stages)]
    return tuple(sum(sizes[:stage]) for stage in range(1, stages))


Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) of one micro-batch -> its summed loss."""


class Pipeline:
    """Runs micro-batches through this rank's stage; the schedule is made once per micro-batch count."""

    def __init__(self, module: nn.Module, plan: Plan, grid: Grid) -> None:
        self._plan = plan
        self._stage = PipelineStage(
            module, grid.at("pp"), plan.pp, grid.device, group=grid.axis("pp").get_group()
        )
        self._is_first = grid.at("pp") == 0
        self._is_last = grid.is_last_stage
        self._schedules: dict[tuple[str, int], PipelineScheduleSingle] = {}
        self._loss: Loss | None = None
        self._seed = 0
        self._samples = ExitStack()
        # The schedule, and not we, calls the module: which samples a call computes comes with its arguments.
        module.register_forward_pre_hook(self._announce, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._end, always_call=True)

    def run(self, batch: Batch, count: int, seed: int, loss: Loss) -> Tensor:
        """Forward and backward of `count` equal micro-batches along dimension 0 of `batch`.

        Args:
            seed: the job's, of dropout.

        Returns:
            the sum of the micro-batches' losses on the last stage, zero elsewhere.
        """
        schedule = self._prepare(self._plan.schedule, count, seed, loss)
        return self._drive(schedule.step, batch)

    def evaluate(self, batch: Batch, count: int, seed: int, loss: Loss) -> Tensor:
        """`run` without backward."""
        # Forward alone is the same in all schedules, and GPipe's wants no least number of micro-batches.
        schedule = self._prepare("gpipe", count, seed, loss)
        with torch.no_grad():
            return self._drive(schedule.eval, batch)

    def _prepare(self, name: str, count: int, seed: int, loss: Loss) -> PipelineScheduleSingle:
        self._loss, self._seed = loss, seed
        if (name, count) not in self._schedules:
            self._schedules[name, count] = SCHEDULES[name](
                self._stage, n_microbatches=count, loss_fn=self._call_loss, scale_grads=False
            )
        return self._schedules[name, count]

    def _drive(self, step: Callable[..., Any], batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        step(
            *(batch.inputs if self._is_first else ()),
            target=batch.targets if self._is_last else None,
            losses=losses,
            return_outputs=False,  # nobody wants the logits of all micro-batches at once
            **batch.keywords,
            **{_SAMPLES: batch.samples},
        )
        if not losses:
            return torch.zeros((), device=batch.samples.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _announce(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keywords = dict(keywords)
        self._samples.enter_context(keyed_samples(module, self._seed, keywords.pop(_SAMPLES)))
        return arguments, keywords

    def _end(self, *_: Any) -> None:
        self._samples.close()

    def _call_loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, target)


_SAMPLES = "wanma_samples"
"""Name under which a micro-batch's samples travel beside the model's own keyword arguments."""
