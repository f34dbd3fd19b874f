"""Pipeline parallel: each rank keeps a run of blocks; torch's schedules drive them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from wanma.data.batch import Batch
from wanma.job.plan import Plan
from wanma.models.dropout import keyed_samples
from wanma.parallel.mesh import Grid

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


Loss = Callable[[Tensor, Tensor], Tensor]
"""(output, targets) of one micro-batch -> its summed loss."""


class Pipeline:
    """Runs micro-batches through this rank's stage; the schedule is made once per micro-batch count."""

    def __init__(self, parts: list[nn.Module], numbers: tuple[int, ...], plan: Plan, grid: Grid) -> None:
        (module,) = parts
        self._plan = plan
        self._stage = PipelineStage(
            module, numbers[0], plan.stages, grid.device, group=grid.axis("pp").get_group()
        )
        self._is_first = 0 in numbers
        self._is_last = plan.stages - 1 in numbers
        self._schedules: dict[tuple[str, int], PipelineScheduleSingle] = {}
        self._loss: Loss | None = None
        self._seed = 0
        self._positions: Tensor | None = None
        self._samples = ExitStack()
        # The schedule, and not we, calls the module: which samples a call computes comes with its arguments.
        module.register_forward_pre_hook(self._announce, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._end, always_call=True)

    def run(self, batch: Batch, positions: Tensor | None, count: int, seed: int, loss: Loss) -> Tensor:
        """Forward and backward of `count` equal micro-batches along dimension 0 of `batch`.

        Args:
            positions: where in the sequence the activations between stages lie; None: all of it.
            seed: the job's, of dropout.

        Returns:
            the sum of the micro-batches' losses on the last stage, zero elsewhere.
        """
        schedule = self._prepare(self._plan.schedule, count, positions, seed, loss)
        return self._drive(schedule.step, batch)

    def evaluate(self, batch: Batch, positions: Tensor | None, count: int, seed: int, loss: Loss) -> Tensor:
        """`run` without backward."""
        # Forward alone is the same in all schedules, and GPipe's wants no least number of micro-batches.
        schedule = self._prepare("gpipe", count, positions, seed, loss)
        with torch.no_grad():
            return self._drive(schedule.eval, batch)

    def _prepare(
        self, name: str, count: int, positions: Tensor | None, seed: int, loss: Loss
    ) -> PipelineScheduleSingle:
        self._loss, self._seed, self._positions = loss, seed, positions
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
        self._samples.enter_context(
            keyed_samples(module, self._seed, keywords.pop(_SAMPLES), self._positions)
        )
        return arguments, keywords

    def _end(self, *_: Any) -> None:
        self._samples.close()

    def _call_loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, target)


_SAMPLES = "wanma_samples"
"""Name under which a micro-batch's samples travel beside the model's own keyword arguments."""
