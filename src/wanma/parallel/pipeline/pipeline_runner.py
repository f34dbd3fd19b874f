"""Pipeline parallelism: execution of a rank's stages by torch's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from wanma.data.batch import Batch
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Schedule
from wanma.models.keyed_random.forward_draws import KeyedForward, RandomDraws
from wanma.parallel.data_parallel.replicated import Replicated
from wanma.parallel.data_parallel.sharded import Sharded
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parameters.stale_parameters import StaleParameterCheck
from wanma.parallel.pipeline.timed_stage import BubbleTimer, TimedPipelineStage
from wanma.parallel.profiling.compute_timer import ComputeTimer
from wanma.planner.pipeline.replay import TimedOperation
from wanma.planner.pipeline.schedules import SPLIT_BACKWARD
from wanma.torch_internals.autograd import is_view, version_counter
from wanma.torch_internals.pipelining import drop_backward_actions

SCHEDULES: dict[Schedule, type[PipelineScheduleSingle | PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

MicroBatchLoss = Callable[[Tensor, Tensor], Tensor]
"""Function (output, targets) of one micro-batch -> its summed loss."""


class PipelineRunner:
    """Runner of micro-batches through this rank's stages.

    Args:
        model_parts: modules of the stages.
        stage_indices: indices of the stages.
        plan: plan of the run.
        parallel_mesh: device meshes of the plan.
        data_parallel: data parallelism of each stage.
        compute_timer: timer of the stages' compute.
        random_draws: random draws of the model's forward.
        stale_parameter_check: parameters of the model before it was cut.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        stage_indices: tuple[int, ...],
        plan: Plan,
        parallel_mesh: ParallelMesh,
        data_parallel: tuple[Sharded | Replicated, ...],
        compute_timer: ComputeTimer,
        random_draws: RandomDraws,
        stale_parameter_check: StaleParameterCheck,
    ) -> None:
        self._compute_timer, self._stale_parameter_check = compute_timer, stale_parameter_check
        self._model_parts = dict(zip(stage_indices, model_parts, strict=True))
        self._data_parallel = dict(zip(stage_indices, data_parallel, strict=True))
        self._plan = plan
        self._parallel_mesh = parallel_mesh
        self._group = parallel_mesh.dim_mesh("pp").get_group()
        self._stage_activations: dict[tuple[int, ...], list[_StageActivation]] = {}
        self._schedules: dict[bool, tuple[tuple[int, ...], Any]] = {}
        """Newest training (True) and evaluation (False) schedule, each with its micro-batches' shape."""
        self._loss: MicroBatchLoss | None = None
        self._bubble_timer = BubbleTimer(parallel_mesh.communication_timer)
        cuts_graph = plan.schedule in SPLIT_BACKWARD
        self._sample_hooks = {
            number: _SampleKeyHook(part, random_draws, no_views=cuts_graph and number < plan.stage_count - 1)
            for number, part in self._model_parts.items()
        }

    def forward_backward(
        self, batch: Batch, positions: Tensor | None, micro_batches: int, loss: MicroBatchLoss
    ) -> Tensor:
        """Run forward and backward of `micro_batches` equal micro-batches along dimension 0 of `batch`.

        Args:
            batch: this rank's rows of a step.
            positions: sequence positions of the activations between stages; None: the complete sequence.
            micro_batches: number of micro-batches.
            loss: loss of one micro-batch on the last stage.

        Returns:
            the sum of the micro-batches' losses on the last stage, zero elsewhere.

        Raises:
            WanmaError: a stage puts out something else than one tensor or changes what its backward needs, or
                the schedule cannot take its backward apart.
        """
        self._set_step_inputs(positions, loss)
        schedule = self._schedule(batch, micro_batches, is_training=True)
        try:
            with self._bubble_timer.measure_bubble():
                total = self._run_schedule(schedule.step, batch)
        except RuntimeError as error:
            if _CHANGED_MEANWHILE in f"{error} {error.__cause__}":
                raise self._in_place_change_error() from error
            reason = next(
                (unsupported for text, unsupported in _SPLIT_BACKWARD_ERRORS.items() if text in str(error)),
                None,
            )
            if self._plan.schedule not in SPLIT_BACKWARD or reason is None:
                raise
            raise WanmaError(
                f"parallel.schedule = '{self._plan.schedule}' splits backward into input and weight "
                f"gradients, but torch {torch.__version__} cannot split {reason}",
                "use parallel.schedule = 'interleaved_1f1b'",
            ) from error
        self._stale_parameter_check.check()
        self._compute_timer.start()
        for part in self._data_parallel.values():
            part.finalize_gradients()
        self._compute_timer.stop(is_forward=False)
        return total

    @property
    def operations(self) -> Sequence[TimedOperation]:
        """Operations of this rank in its last training step, in their order; on a GPU after `read_times`."""
        return self._bubble_timer.operations

    def read_times(self) -> None:
        """Read the times of the last training step on a GPU; its host has just waited for the stream."""
        self._bubble_timer.read()

    def evaluate(
        self, batch: Batch, positions: Tensor | None, micro_batches: int, loss: MicroBatchLoss
    ) -> Tensor:
        """Run forward alone, as `run`, of any number of micro-batches."""
        self._set_step_inputs(positions, loss)
        self._compute_timer.is_enabled = False
        try:
            with torch.no_grad():
                return self._run_schedule(self._schedule(batch, micro_batches, is_training=False).eval, batch)
        finally:
            self._compute_timer.is_enabled = True

    def _in_place_change_error(self) -> JobError:
        """Return the refusal of a forward pass that changes what the backward of another needs."""
        try:
            for part in self._data_parallel.values():
                part.check_weights_unchanged()
        except JobError as refusal:
            return refusal
        return JobError(
            f"parallel.pp = {self._plan.pp}: a tensor that backward needs was changed in place after its "
            "forward pass, probably by the forward pass of another micro-batch (if training on one rank "
            "works)",
            "create new tensors in forward (self.x = ... for a buffer, not self.x.copy_(...)), or set "
            "parallel.pp = 1",
        )

    def _set_step_inputs(self, positions: Tensor | None, loss: MicroBatchLoss) -> None:
        self._loss = loss
        for sample_hook in self._sample_hooks.values():
            sample_hook.positions = positions

    def _schedule(self, batch: Batch, count: int, *, is_training: bool) -> Any:
        """Return torch's schedule for `count` micro-batches of this shape, with stages and buffers."""
        shape = (count, batch.rows // count, *batch.inputs[0].shape[1:])
        known_shape, schedule = self._schedules.get(is_training, (None, None))
        if known_shape == shape:
            return schedule
        if shape[1:] not in self._stage_activations:
            self._stage_activations[shape[1:]] = self._infer_activations(batch, batch.rows // count)
        stages = [self._stage(number, self._stage_activations[shape[1:]]) for number in self._model_parts]
        schedule = (
            self._training_schedule(stages, count)
            if is_training
            else self._evaluation_schedule(stages, count)
        )
        self._schedules[is_training] = shape, schedule
        return schedule

    def _training_schedule(self, stages: list[TimedPipelineStage], count: int) -> Any:
        kind: Any = SCHEDULES[self._plan.schedule]
        stage_argument = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
        return kind(stage_argument, n_microbatches=count, loss_fn=self._timed_loss, scale_grads=False)

    def _evaluation_schedule(self, stages: list[TimedPipelineStage], count: int) -> Any:
        """Return a schedule for any number of micro-batches, without its backward.

        torch's own `eval` skips only the computation of a backward: it still wants as many micro-batches as
        training does, and fails for the schedules in which a rank holds neighbouring stages.
        """
        kind: Any = ScheduleZBVZeroBubble if self._plan.is_v_shaped else ScheduleLoopedBFS
        schedule: Any = kind(stages, n_microbatches=count, loss_fn=self._timed_loss, scale_grads=False)
        drop_backward_actions(schedule)
        return schedule

    def _stage(self, number: int, activations: list[_StageActivation]) -> TimedPipelineStage:
        return TimedPipelineStage(
            self._bubble_timer,
            self._compute_timer,
            self._model_parts[number],
            number,
            self._plan.stage_count,
            self._parallel_mesh.device,
            input_args=activations[number].meta_tensor(),
            output_args=activations[number + 1].meta_tensor(),
            group=self._group,
        )

    @torch.no_grad()
    def _infer_activations(self, batch: Batch, rows: int) -> list[_StageActivation]:
        """Return the boundaries before the first and after each stage, for micro-batches of `rows` samples.

        Each stage runs once, on zeros but for the first, in evaluation mode: models that count in training
        what they see have then seen nothing. torch finds the same out by runs in training, on
        uninitialized memory.
        """
        keywords = {name: tensor[:rows] for name, tensor in batch.keywords.items()}
        stage_input = batch.inputs[0][:rows].clone()  # which a stage may change
        activations = [_StageActivation(tuple(stage_input.shape), stage_input.dtype, requires_grad=False)]
        for number in range(self._plan.stage_count):
            results: list[Any] = [None]
            failure: Exception | None = None
            if number in self._model_parts:
                if number > 0:
                    stage_input = torch.zeros(
                        activations[-1].shape, dtype=activations[-1].dtype, device=self._parallel_mesh.device
                    )
                stage_keywords = {**keywords, SAMPLE_INDICES_KEYWORD: batch.samples[:rows]}
                try:
                    results = [
                        self._infer_activation_after(number, stage_input, stage_keywords, activations[-1])
                    ]
                except Exception as error:  # the other ranks wait for its result
                    failure, results = error, [_error_for_other_ranks(error, number)]
            source_rank = next(
                rank for rank in range(self._plan.pp) if number in self._plan.stages_of_pipeline_rank(rank)
            )
            dist.broadcast_object_list(
                results,
                src=dist.get_global_rank(self._group, source_rank),
                group=self._group,
                device=torch.device("cpu"),
            )
            if failure is not None:
                raise failure
            if isinstance(results[0], Exception):
                raise results[0]
            activations += results
        return activations

    def _infer_activation_after(
        self,
        number: int,
        stage_input: Tensor,
        keywords: dict[str, Tensor],
        input_activation: _StageActivation,
    ) -> _StageActivation:
        part = self._model_parts[number]
        training_modes = {module: module.training for module in part.modules()}
        try:
            version = version_counter(stage_input)
            output = part.eval()(stage_input, **keywords)
            self._sample_hooks[number].modifies_input |= version_counter(stage_input) != version
        finally:
            part.train(training_modes[part])  # modules may do more there than note the mode
            for module, training in training_modes.items():
                module.training = training
        self._data_parallel[number].reshard()
        if not isinstance(output, Tensor):
            raise JobError(
                f"parallel.pp = {self._plan.pp}: the output of stage {number} is a "
                f"{type(output).__name__}, but a stage must return one tensor",
                "return one tensor from every part of the model, or set parallel.pp = 1",
            )
        # A backward that is taken apart finds weights only on the way from a stage's output to its input, so
        # that an input must have a gradient even if all before it is frozen.
        requires_grad = self._plan.schedule in SPLIT_BACKWARD or input_activation.requires_grad
        requires_grad = requires_grad or any(parameter.requires_grad for parameter in part.parameters())
        return _StageActivation(tuple(output.shape), output.dtype, requires_grad)

    def _run_schedule(self, step: Callable[..., Any], batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        step(
            *(batch.inputs if 0 in self._model_parts else ()),
            target=batch.targets if self._plan.stage_count - 1 in self._model_parts else None,
            losses=losses,
            return_outputs=False,  # the logits of all micro-batches are not used
            **batch.keywords,
            **{SAMPLE_INDICES_KEYWORD: batch.samples},
        )
        if not losses:
            return torch.zeros((), device=batch.samples.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _timed_loss(self, output: Tensor, target: Tensor) -> Tensor:
        assert self._loss is not None
        with self._bubble_timer.time_loss():
            self._compute_timer.start()
            loss = self._loss(output, target)
            self._compute_timer.stop(is_forward=True)
            return loss


def _error_for_other_ranks(error: Exception, stage: int) -> Exception:
    """Return what the ranks without a stage raise for its error.

    A user reads the error of whichever rank ends first: that of user code is the same on all.
    """
    return error if isinstance(error, WanmaError) else RuntimeError(f"stage {stage} of the pipeline: {error}")


@dataclass(frozen=True)
class _StageActivation:
    """Shape and dtype of the tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    """True if the tensor needs a gradient: something before it is trained."""

    def meta_tensor(self) -> Tensor:
        """Return such a tensor without storage, from which torch makes its buffers."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=self.requires_grad)


class _SampleKeyHook:
    """Hooks that tell the dropout of one stage its samples: the schedule, and not wanma, calls the module.

    The arguments of a call say which samples it computes.

    Args:
        model_part: module of the stage.
        random_draws: random draws of the model's forward.
        no_views: true if the stage may not put out a view: schedules that take a backward apart cut the graph
            off the output.
    """

    def __init__(self, model_part: nn.Module, random_draws: RandomDraws, *, no_views: bool) -> None:
        self.positions: Tensor | None = None
        self.modifies_input = False
        """True if the stage writes to its input, which is a leaf of the graph here and must not change."""
        self._random_draws = random_draws
        self._key_scope = ExitStack()
        self._forward: KeyedForward | None = None
        self._no_views = no_views
        model_part.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True)
        model_part.register_forward_hook(self._end, always_call=True)

    def _begin(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        keywords = dict(keywords)
        samples = keywords.pop(SAMPLE_INDICES_KEYWORD)
        forward = self._random_draws.forward(module, samples, self.positions)
        self._forward = self._key_scope.enter_context(forward)
        if self.modifies_input:
            arguments = tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)
        return arguments, keywords

    def _end(self, module: nn.Module, arguments: Any, output: Any) -> Any:  # noqa: ARG002  # a hook's
        with self._key_scope:
            if output is not None and self._forward is not None:
                self._forward.end_forward()
        return output.clone() if self._no_views and isinstance(output, Tensor) and is_view(output) else output


SAMPLE_INDICES_KEYWORD = "wanma_samples"
"""Name under which a micro-batch's samples travel beside the model's own keyword arguments."""
_CHANGED_MEANWHILE = "has been modified by an inplace operation"
"""Part of torch's message about a tensor that changed before its backward."""
_SPLIT_BACKWARD_ERRORS = {
    "backward through the graph a second": "a parameter that one stage uses twice",
}
"""Parts of torch's messages when it fails to take a backward apart, and the cause of each."""
