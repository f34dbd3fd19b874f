"""Ways to break parallel training silently, each of them one line that somebody could get wrong.

A rank that calls one of these before it trains (`run_job(..., patch=...)`) leaves out one collective, one
factor or one mask; nothing crashes and nothing hangs, only the numbers differ.
`tests/parallel/test_mutations.py` shows that the comparison of runs notices each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from wanma.collectives.fsdp import point_to_point_collectives, shared_memory_collectives
from wanma.collectives.timing.communication_timer import AsyncTransfer
from wanma.models.keyed_random import forward_draws
from wanma.models.layers.router import TopKRouter
from wanma.parallel import parallelize
from wanma.parallel.context import all_to_all_attention, ring_attention
from wanma.parallel.expert import expert_parallel
from wanma.parallel.gradients import reduction_groups
from wanma.parallel.pipeline import pipeline_runner, tied_weights
from wanma.parallel.tensor import local_parameters, tensor_parallel
from wanma.training.loss import cross_entropy
from wanma.training.optimizer import named_optimizer
from wanma.training.run import trainer
from wanma.training.step import forward_backward, model_statistics, parameter_update


class _Changed:
    """A module with some of its names replaced."""

    def __init__(self, module: Any, names: dict[str, Any]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        return self._names[name] if name in self._names else getattr(self._module, name)


def _without_all_reduce(module: Any, unless: Callable[..., bool] = lambda *_, **__: False) -> None:
    """Let `module`'s all-reduces do nothing, `unless` says of a call's arguments that it may."""

    def all_reduce(*arguments: Any, **keywords: Any) -> Any:
        return dist.all_reduce(*arguments, **keywords) if unless(*arguments, **keywords) else None

    module.dist = _Changed(dist, {"all_reduce": all_reduce})


# ---------------------------------------------------------------- tensor and sequence


class _UnsummedTensorGroup(tensor_parallel._TensorGroup):
    def reduce(self, parts: Tensor) -> Tensor:
        return parts


def _not_summed(style: str) -> None:
    apply = tensor_parallel._APPLY_STYLE[style]  # type: ignore[index]  # a literal
    tensor_parallel._APPLY_STYLE[style] = lambda module, group: apply(  # type: ignore[index]
        module, _UnsummedTensorGroup(group.mesh, group.residual_placement, group.parallel_spec)
    )


def products_of_rows_are_not_summed() -> None:
    _not_summed("row")


def embeddings_are_not_summed() -> None:
    _not_summed("vocabulary")


def tokens_of_other_ranks_are_not_masked() -> None:
    """Their embedding is added, as that of token 0."""

    def where(mask: Tensor, x: Tensor, other: Any) -> Tensor:
        return x if x.is_floating_point() else torch.where(mask, x, other)

    tensor_parallel.torch = _Changed(torch, {"where": where})  # type: ignore[assignment]


def gradients_of_gathered_inputs_are_not_summed() -> None:
    local_parameters._Redistribute.backward = staticmethod(
        lambda _, gradient: (gradient, None, None, None, None)
    )  # type: ignore[method-assign]


def _move_otherwise(move: Callable[..., Tensor | None]) -> None:
    """Replace `_timed_collective` where `move` does not give None."""
    right = local_parameters._timed_collective

    def moved(x: Tensor, source: Placement, target: Placement, ranks: int, group: str) -> Tensor:
        result = move(right, x, source, target, ranks, group)
        return right(x, source, target, ranks, group) if result is None else result

    local_parameters._timed_collective = moved


def scattered_parts_are_not_summed() -> None:
    def own_part(_: Any, x: Tensor, source: Any, target: Any, ranks: int, __: str) -> Tensor | None:
        if not (isinstance(source, Partial) and isinstance(target, Shard)):
            return None
        return x.chunk(ranks, target.dim)[dist.get_rank() % ranks].contiguous()

    _move_otherwise(own_part)


def sequence_is_gathered_in_another_order() -> None:
    def turned(right: Any, x: Tensor, source: Any, target: Any, ranks: int, group: str) -> Tensor | None:
        if not (isinstance(source, Shard) and isinstance(target, Replicate)):
            return None
        whole: Tensor = right(x, source, target, ranks, group)
        return whole.roll(x.shape[source.dim], source.dim)

    _move_otherwise(turned)


def gradients_of_norms_are_of_a_part_of_the_sequence() -> None:
    """Each rank updates its copy by the gradient of its own tokens."""
    tensor_parallel.replicated_with_partial_gradient = local_parameters.local_shard


def all_look_at_the_first_key_head() -> None:
    right = tensor_parallel.local_kv_heads
    tensor_parallel.local_kv_heads = lambda *arguments: [0] * len(right(*arguments))


# ---------------------------------------------------------------- the loss over a split vocabulary


def normalizers_are_of_ones_own_classes() -> None:
    def only_the_largest(x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> bool:
        return bool(op == dist.ReduceOp.MAX)

    _without_all_reduce(cross_entropy, unless=only_the_largest)


def targets_count_on_every_rank() -> None:
    right = cross_entropy._local_targets

    def columns(targets: Tensor, classes: int, group: Any) -> tuple[Tensor, Tensor]:
        column, is_here = right(targets, classes, group)
        return column, torch.ones_like(is_here)

    cross_entropy._local_targets = columns


# ---------------------------------------------------------------- context


def _see_otherwise(change: Callable[[Any], Any]) -> None:
    right = ring_attention._visible_block

    def block(*arguments: Any) -> Any:
        found = right(*arguments)
        return replace(found, visibility=change(found.visibility))

    ring_attention._visible_block = block


def ones_own_block_is_not_causal() -> None:
    _see_otherwise(lambda visibility: replace(visibility, causal=False))


def documents_see_each_other_across_ranks() -> None:
    _see_otherwise(
        lambda visibility: visibility if visibility.causal else replace(visibility, document_ids=None)
    )


def blocks_are_merged_with_equal_weights() -> None:
    def merge(output: Tensor, log_sum_exp: Tensor, block_output: Tensor, block_log_sum: Tensor) -> None:
        output.lerp_(block_output.to(output.dtype), 0.5)
        log_sum_exp.copy_(torch.logaddexp(log_sum_exp, block_log_sum))

    ring_attention._merge = merge


def log_sums_are_of_ones_own_block() -> None:
    """Only backward uses them, where two ranks make the ring."""
    right = ring_attention._merge
    ring_attention._merge = lambda output, log_sum_exp, *block: right(output, log_sum_exp.clone(), *block)


def gradients_of_keys_do_not_travel() -> None:
    right = ring_attention._Ring.send_to_next

    def send_to_next(self: Any, x: Tensor, tag: int) -> Any:
        if tag == ring_attention._GRADIENT_TAG:
            return ring_attention._PendingReceive(x, x, [], AsyncTransfer("context"))
        return right(self, x, tag)

    ring_attention._Ring.send_to_next = send_to_next  # type: ignore[method-assign]


def gradients_of_heads_are_not_exchanged() -> None:
    all_to_all_attention._AllToAll.backward = staticmethod(lambda _, gradient: (gradient, None))  # type: ignore[method-assign]


def positions_are_those_of_the_front() -> None:
    """Rotary angles of every rank as if its part of the sequence were the first."""
    right = forward_backward.shard_sequence

    def shard(batch: Any, parallel_mesh: Any) -> Any:
        part = right(batch, parallel_mesh)
        local_length = part.targets.shape[1]
        first = batch.keywords["positions"][:, :local_length]
        return replace(part, keywords={**part.keywords, "positions": first})

    forward_backward.shard_sequence = shard


# ---------------------------------------------------------------- dropout


def dropout_does_not_know_its_positions() -> None:
    forward_backward.residual_positions = lambda *_: None


def dropout_is_keyed_by_row() -> None:
    """Key dropout by the row within the micro-batch instead of the run."""
    right = forward_draws.bind_samples

    def keyed(model: Any, seed: int, samples: Tensor, *more: Any) -> Any:
        rows = torch.arange(len(samples))
        return right(model, seed, torch.where(samples >= 0, rows, samples), *more)

    forward_draws.bind_samples = keyed


# ---------------------------------------------------------------- experts


def results_return_in_the_order_of_experts() -> None:
    expert_parallel.unpermute_tokens = lambda rows, *_: rows


def weights_stay_in_the_order_of_senders() -> None:
    right = expert_parallel.permute_tokens
    expert_parallel.permute_tokens = lambda x, *order: x if x.shape[-1] == 1 else right(x, *order)


def gradients_of_experts_stay_with_one_replica() -> None:
    """Experts have fewer replicas than the rest of the model."""

    def of_the_rest(*_: Any, group: Any, **__: Any) -> bool:
        return bool(group.size() == dist.get_world_size())

    _without_all_reduce(_fsdp_collectives, unless=of_the_rest)


def load_is_that_of_one_rank() -> None:
    statistics = model_statistics.ModelStatistics
    pop, take = statistics.pop_local, statistics.take_sums
    own: list[Tensor] = []

    def pop_local(self: Any) -> Tensor:
        own[:] = [pop(self)]
        return own[0]

    statistics.pop_local = pop_local  # type: ignore[method-assign]
    statistics.take_sums = lambda self, _: take(self, own[0])  # type: ignore[method-assign]


def balance_is_that_of_a_part_of_the_sample() -> None:
    _without_all_reduce(expert_parallel)


def capacity_goes_by_the_order_held() -> None:
    """And not by the order of the sequence: other tokens are dropped."""
    expert_parallel.ShardedSampleReduction._gathered_positions = lambda self, held, _: torch.arange(
        held * self._context_ranks
    )  # type: ignore[method-assign]


def balancing_loss_has_no_factor() -> None:
    TopKRouter.auxiliary_loss_scale = property(lambda _: 1.0, lambda *_: None)  # type: ignore[assignment]


# ---------------------------------------------------------------- pipeline


def gradients_are_divided_by_micro_batches() -> None:
    """torch's own default."""
    right = pipeline_runner.PipelineRunner._training_schedule

    def training(self: Any, *arguments: Any) -> Any:
        schedule = right(self, *arguments)
        schedule.scale_grads = True
        return schedule

    pipeline_runner.PipelineRunner._training_schedule = training  # type: ignore[method-assign]


def tied_gradients_are_not_summed() -> None:
    _without_all_reduce(tied_weights)


def tied_tensors_count_twice_in_the_norm() -> None:
    def norm(self: named_optimizer.NamedOptimizer, plan: Any) -> Tensor:
        return named_optimizer.local_squared_norm(self.gradients(), plan)

    named_optimizer.NamedOptimizer.squared_norm = norm  # type: ignore[method-assign]


# ---------------------------------------------------------------- data


def replicas_are_not_summed() -> None:
    class Nothing:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None: ...

    reduction_groups.make_backend_all_reduce = lambda _: lambda _bucket: Nothing()


def replicas_of_shards_are_not_summed() -> None:
    _without_all_reduce(_fsdp_collectives)


def shards_keep_their_own_gradient() -> None:
    def keep(_: Any, output_tensor: Tensor, input_tensor: Tensor, group: Any, *__: Any, **___: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    for scatter in (
        point_to_point_collectives.PointToPointReduceScatter,
        shared_memory_collectives.SharedMemoryReduceScatter,
    ):
        scatter.__call__ = keep  # type: ignore[method-assign]


def the_divisor_is_forgotten() -> None:
    right = parallelize._apply_data_parallel
    parallelize._apply_data_parallel = lambda *arguments, **keywords: replace(
        right(*arguments, **keywords), gradient_divisor=1
    )


# ---------------------------------------------------------------- the end of a step


def replicated_gradients_count_on_every_rank() -> None:
    def share(gradients: Any, *_: Any) -> Tensor:
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        return torch.stack([part.double().square().sum() for part in parts]).sum()

    named_optimizer.local_squared_norm = share


def ranks_do_not_agree_on_the_step() -> None:
    _without_all_reduce(parameter_update)


def the_mean_is_over_all_targets_that_could_be() -> None:
    """Divide by all targets, those that a mask took away included."""
    right = trainer.reduce_step_totals

    def reduce(*arguments: Any, **keywords: Any) -> Any:
        totals = right(*arguments, **keywords)
        norm = totals.gradient_norm / totals.gradient_multiplier
        return replace(totals, gradient_multiplier=1.0, gradient_norm=norm)

    trainer.reduce_step_totals = reduce
