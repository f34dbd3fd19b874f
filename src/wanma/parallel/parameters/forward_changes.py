"""Detection of weights that a model's forward changes: clamped, renormalized, or averaged from a student.

A plain loop over the global batch makes such a change once a step and keeps it. Here a model that computes
with its state keeps it too, which is the same where all replicas make the same change, once, or where making
it again changes nothing. Copies of shards lose it, and a change to them is refused here, like every other
one.

`torch.Tensor._version` reveals most changes, but none by way of `.data`. These are seen by their values, in
the first steps and in some of the later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.job.errors import AllRanksError, JobError
from wanma.torch_internals.autograd import gradient_hooks, post_accumulate_hooks, version_counter
from wanma.torch_internals.dtensor import local_part
from wanma.torch_internals.fake_tensors import is_fake
from wanma.torch_internals.fsdp import FsdpParameter, FsdpParameterGroup

CHECKED_FIRST_STEPS = 3
"""Number of first steps in which values are compared.

A teacher begins as its student, and follows it from the second step on.
"""
_STEPS_BETWEEN_CHECKS = 100
"""Steps from one later comparison to the next, for changes that begin while training runs.

To read all weights twice in so many steps costs less than a thousandth of them.
"""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BETWEEN_STEPS = "change weights between two steps, in a custom loop (wanma.session)"


def as_integer_bits(tensor: Tensor) -> Tensor:
    """Return the bits of this rank's part of a tensor as integers, so that equal NaNs compare equal."""
    local = local_tensor(tensor).detach()
    if local.is_complex():
        local = torch.view_as_real(local)
    return local.contiguous().view(_INTEGERS[local.itemsize])


def is_checked_step(step: int) -> bool:
    """Return whether values are compared in a step.

    Args:
        step: number of steps before it.
    """
    return step < CHECKED_FIRST_STEPS or step % _STEPS_BETWEEN_CHECKS == 0


def checksum(tensor: Tensor) -> Tensor:
    flat = as_integer_bits(tensor).view(-1)
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        flat = flat.view(torch.int64)  # summed ten times as fast as what must be converted
    return flat.sum(dtype=torch.int64)


def lost_change_error(name: str, *, on_cpu: bool) -> JobError:
    """Return the refusal of a change to a weight of which ranks compute with copies."""
    replicas = "; replicas in fp32 keep the change (parallel.shard = 'none', train.precision = 'fp32')"
    return JobError(
        f"{name} was modified in a forward pass, but the forward pass uses a gathered or lower-precision "
        "form of the weights, so the change is lost",
        f"{_BETWEEN_STEPS}, and unset max_norm of nn.Embedding{replicas if on_cpu else ''}",
    )


class ForwardChangeCheck:
    """Changes in one step to weights that compute in the memory of the state.

    Args:
        names: names of the parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._steps = 0
        self._tensors: Sequence[Tensor] = ()
        self._versions: list[int] = []
        self._checksums: list[Tensor] | None = None
        self._micro_batches = 0
        self._after_first: dict[int, Tensor] = {}
        """Values of the weights that the first micro-batch has changed, as integers, by parameter index."""

    def begin_step(self, tensors: Sequence[Tensor]) -> None:
        """Note the weights before the first forward of a step.

        Args:
            tensors: tensors that compute, in the order of the names.
        """
        self._tensors = tensors
        self._versions = [version_counter(tensor) for tensor in tensors]
        compares = is_checked_step(self._steps) and not any(map(has_no_data, tensors))
        self._checksums = [checksum(tensor) for tensor in tensors] if compares else None

    def begin_micro_batch(self) -> None:
        if self._micro_batches == 1:
            self._after_first = {
                index: as_integer_bits(self._tensors[index]).clone() for index in self._changed_indices()
            }
        self._micro_batches += 1

    def end_step(self) -> bool:
        """Check the weights after the last backward of a step.

        Returns:
            True if a weight has changed.

        Raises:
            JobError: several micro-batches have each changed it; or the forward has hooked its gradient.
        """
        if self._steps < CHECKED_FIRST_STEPS:
            for name, tensor in zip(self._names, self._tensors, strict=bool(self._tensors)):
                _require_no_hooks(name, tensor, own_hooks=1)
        changed_indices = self._changed_indices()
        for index in changed_indices if self._micro_batches != 1 else ():
            first = self._after_first.get(index)
            if first is None or not torch.equal(first, as_integer_bits(self._tensors[index])):
                raise JobError(
                    f"{self._names[index]} was modified in a forward pass, but a step has one forward "
                    "pass per micro-batch here, where a plain loop over the global batch has one",
                    f"{_BETWEEN_STEPS}, or use one micro-batch per step (parallel.micro_batch, "
                    "parallel.pp = 1)",
                )
        self._steps += 1
        self._micro_batches, self._after_first = 0, {}
        return bool(changed_indices)

    def compare_replicas(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Compare the weights of replicas, after some rank's have changed; every data rank calls it.

        Raises:
            AllRanksError: the weights of another replica have changed otherwise.
        """
        own_checksums = [int(checksum(tensor)) for tensor in self._tensors]
        for group in groups:
            checksums_by_rank = [own_checksums] * group.size()
            dist.all_gather_object(checksums_by_rank, own_checksums, group=group)
            for name, sums in zip(self._names, zip(*checksums_by_rank, strict=True), strict=True):
                if len(set(sums)) > 1:
                    raise AllRanksError(
                        f"{name} was modified in a forward pass, and the replicas now differ",
                        f"{_BETWEEN_STEPS}, and unset max_norm of nn.Embedding",
                    )

    def _changed_indices(self) -> list[int]:
        return [
            index
            for index, (tensor, version) in enumerate(zip(self._tensors, self._versions, strict=True))
            if version_counter(tensor) != version
            or (self._checksums is not None and bool(checksum(tensor) != self._checksums[index]))
        ]


class GatheredCopyCheck:
    """Unsharded copies of the shards of one FSDP2 unit, which are discarded after use.

    Args:
        model: module that has the unit's parameters, by name.
        group: FSDP2's parameter group of the unit.
    """

    def __init__(self, model: nn.Module, group: FsdpParameterGroup) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._group = group
        self._names = [names.get(id(shard.sharded_param), "a parameter") for shard in group.fsdp_params]
        self._steps = 0
        self._versions: list[int] | None = None
        self._addresses: list[int] = []

    def record_versions(self) -> None:
        """Note the versions of the copies after a gather. A further gather leaves them as they are."""
        if self._versions is None:
            self._versions = [version_counter(shard.unsharded_param) for shard in self._group.fsdp_params]
            self._addresses = [
                0 if has_no_data(shard.unsharded_param) else local_tensor(shard.unsharded_param).data_ptr()
                for shard in self._group.fsdp_params
            ]

    def check_values(self) -> None:
        """Compare the copies with the shards, while they are gathered.

        Raises:
            JobError: this rank's part of a copy is no longer equal to its shard.
        """
        if not is_checked_step(self._steps) or not self._group.is_unsharded:
            return
        for index, (name, shard) in enumerate(zip(self._names, self._group.fsdp_params, strict=True)):
            local = local_part(shard.sharded_param)
            if has_no_data(shard.unsharded_param):
                continue
            full_weight, dim = local_tensor(shard.unsharded_param), shard.fsdp_placement.dim
            if hasattr(local, "fsdp_pre_all_gather"):  # a part of the whole, unless that has been replaced
                if self._addresses and full_weight.data_ptr() != self._addresses[index]:
                    raise self._lost_change_error(name)
                continue
            own_part = full_weight.narrow(dim, _shard_start(shard, full_weight.shape[dim]), local.shape[dim])
            if not torch.equal(as_integer_bits(own_part), as_integer_bits(local.to(own_part))):
                raise self._lost_change_error(name)

    def end_step(self) -> None:
        """Check the copies at the end of a step.

        Raises:
            JobError: a copy has been written to since it was gathered first.
        """
        self._steps += 1
        for name, shard in zip(self._names, self._group.fsdp_params, strict=True):
            if self._versions is not None and self._steps <= CHECKED_FIRST_STEPS:
                _require_no_hooks(name, shard.unsharded_param)
        for index, shard in enumerate(self._group.fsdp_params if self._versions is not None else ()):
            assert self._versions is not None
            if version_counter(shard.unsharded_param) != self._versions[index]:
                raise self._lost_change_error(self._names[index])

    def _lost_change_error(self, name: str) -> JobError:
        return lost_change_error(name, on_cpu=self._group.device.type == "cpu")


def _require_no_hooks(name: str, computing: Tensor, own_hooks: int = 0) -> None:
    """Refuse hooks on a tensor that computes: they would see one micro-batch's gradient.

    Args:
        name: name of the parameter.
        computing: tensor that computes.
        own: number of wanma's own hooks on it.
    """
    if gradient_hooks(computing) or len(post_accumulate_hooks(computing) or ()) > own_hooks:
        raise JobError(
            f"{name}: a forward pass registers a hook on this parameter, but the hook would get the "
            "gradient of one micro-batch on one rank",
            "register it once before training: then it gets the gradient of the global batch",
        )


def _shard_start(shard: FsdpParameter, size: int) -> int:
    """Return the index at which this rank's part begins in a dim of `size` elements."""
    shards, rank = (
        getattr(shard.mesh_info, "shard_mesh_size", 1),
        getattr(shard.mesh_info, "shard_mesh_rank", 0),
    )
    return min(rank * -(-size // shards), size)


def has_no_data(tensor: Tensor) -> bool:
    """Return whether a tensor has no values, as in a dry run."""
    local = local_tensor(tensor)
    return is_fake(local) or local.is_meta
