"""Checks of a user's module that parameter servers train: they hold its parameters, and nothing else of it.

Worker 0 validates and saves with a module of its own, which computes no step. What a forward changes in the
module of a worker would reach neither it nor the other workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.data.datasets.fingerprint import describe_tensor, hash_texts
from wanma.job.errors import JobError
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.parallel.parallelize import ParallelModel
from wanma.parallel.parameters.forward_changes import is_checked_step

_SERVED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of parameters that fp32 holds exactly."""
_WITHOUT_SERVERS = "or train without servers (servers.count = 0)"


class ServedModuleCheck:
    """Check that of a user's module only the parameters change, and these by the servers alone.

    Running statistics of batch normalization are worker 0's. Here they are NaN, so that a training loss that
    reads them shows it.

    Args:
        model: model of a worker, before its first step.

    Raises:
        JobError: servers cannot hold a parameter.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model, self._steps = model, 0
        self._moved: set[str] = set()
        """Names of the buffers that worker 0 alone updates."""
        for name, parameter in model.named_parameters():
            if parameter.dtype not in _SERVED_DTYPES or not parameter.numel():
                raise JobError(
                    f"parameter servers do not support {name}: it is {parameter.dtype}, "
                    f"{tuple(parameter.shape)}, and they hold fp32 with at least one element",
                    f"make it fp32 or a buffer (register_buffer), {_WITHOUT_SERVERS}",
                )
        for path, module in model.module.named_modules():
            if isinstance(module, GroupedBatchNorm) and module.training:
                module.running_mean.fill_(math.nan)
                module.running_var.fill_(math.nan)
                names = ("num_batches_tracked", "running_mean", "running_var")
                self._moved.update(f"{path}.{name}" if path else name for name in names)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._buffers = {name: buffer for name, buffer in buffers.items() if name not in self._moved}

    @property
    def fingerprint(self) -> str:
        """Hash of a few elements of each buffer, which the constructor makes alike in all workers."""
        return hash_texts(*(f"{name} {describe_tensor(buffer)}" for name, buffer in self._buffers.items()))

    def refuse_other_buffers(self, model: ParallelModel) -> None:
        """Compare buffers that a constructor has made with those of worker 0's restored state.

        Raises:
            JobError: a buffer differs.
        """
        restored = dict(model.named_buffers())
        for name, buffer in self._buffers.items():
            if not torch.equal(restored[name], buffer):
                raise JobError(
                    f"buffer {name} of the checkpoint differs from that of a newly constructed module, "
                    "with which workers of parameter servers compute",
                    "make it a parameter with requires_grad = False, or construct it with its value, "
                    + _WITHOUT_SERVERS,
                )

    def check_step(self, pulled: Mapping[str, Tensor], loss_sum: float) -> None:
        """Compare parameters and buffers after a step's backward, in some steps (`is_checked_step`).

        Args:
            pulled: parameters of the step as the servers hold them.
            loss_sum: sum of the losses.

        Raises:
            JobError: a forward has changed one, or the first loss may have read running statistics.
        """
        if self._steps == 0 and self._moved and not math.isfinite(loss_sum):
            raise JobError(
                f"the loss of the first step is {loss_sum}, and workers of parameter servers have no running "
                f"statistics in training: {max(self._moved)} is NaN",
                f"read no running statistics in training, {_WITHOUT_SERVERS}; if the loss is not finite then "
                "either, lower train.learning_rate",
            )
        self._steps += 1
        if not is_checked_step(self._steps - 1):
            return
        before = {**self._buffers, **pulled}
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if name in self._moved:
                continue
            value = local_tensor(tensor).detach()
            if name not in before:  # a buffer that the first forward has made
                self._buffers[name] = value.clone()
            elif not torch.equal(value.to(before[name]), before[name]):
                raise JobError(
                    f"{name} was modified in a forward pass, but parameter servers change parameters by "
                    "gradients, and hold no buffers",
                    "change no weight or buffer in the forward pass (of batch normalization, set "
                    f"model.batch_norm_group), {_WITHOUT_SERVERS}",
                )


class DividedGlobalBatch:
    """Global batch that synchronous workers share, as `wanma.global_batch` sees it: none has all rows."""

    def gather(self, x: Tensor) -> Tensor:  # noqa: ARG002  # of the interface
        """Refuse the gather.

        Raises:
            JobError: always.
        """
        raise JobError(
            "wanma.global_batch needs the global batch at once, which synchronous workers of parameter "
            "servers share and do not exchange",
            f"set parallel.dp_replicate = 1, {_WITHOUT_SERVERS}",
        )

    indices = gather
