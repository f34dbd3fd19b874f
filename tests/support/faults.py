"""Ways for a run to fail at an exact step; `run_job` takes them as `patch`."""

from __future__ import annotations

import errno
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.checkpoint.in_memory.in_memory_checkpointer import _BufferedMemoryFile
from wanma.checkpoint.in_memory.memory_file import read_header
from wanma.checkpoint.in_memory.partner_replication import PartnerReplicator
from wanma.checkpoint.save.checkpointer import Checkpointer, SaveResult
from wanma.training.checkpointing import in_memory_interval
from wanma.training.checkpointing.in_memory_checkpoints import InMemoryCheckpoints
from wanma.training.run.trainer import Trainer


class InjectedError(RuntimeError):
    pass


def _before(step: int, is_due: Callable[[Trainer], bool]) -> None:
    finish_step = Trainer.finish_step

    def failing(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if self.state.step + 1 == step and is_due(self):
            raise InjectedError(f"injected before the update of step {step}")
        return finish_step(self, *arguments, **keywords)

    Trainer.finish_step = failing  # type: ignore[method-assign]


def rank_0_fails_in_step_4() -> None:
    _before(4, lambda trainer: trainer.worker.rank == 0)


def rank_1_fails_in_step_4() -> None:
    _before(4, lambda trainer: trainer.worker.rank == 1)


def rank_0_is_killed_in_step_4() -> None:
    def kill(trainer: Trainer) -> bool:
        if trainer.worker.rank == 0:
            signal.raise_signal(signal.SIGKILL)
        return False

    _before(4, kill)


def snapshots_may_come_every_five_steps() -> None:
    """Whatever they cost."""
    in_memory_interval.interval_steps = lambda _cost, _step: 5  # type: ignore[assignment]


def rank_1_has_no_memory_for_snapshots() -> None:
    """Or rank 0, where it is alone."""
    right = InMemoryCheckpoints._require_memory

    def require(self: InMemoryCheckpoints, needed: int) -> None:
        last = self._worker.rank == self._worker.world_size - 1
        right(self, 1 << 60 if last else needed)

    InMemoryCheckpoints._require_memory = require  # type: ignore[method-assign]


def rank_0_dies_while_it_copies_step_3() -> None:
    """Slowly: any other rank has the time to go on without it, if nothing holds it."""
    reserve = _BufferedMemoryFile.reserve

    def dying(self: _BufferedMemoryFile, rank_manifest_bytes: int, is_cuda: bool) -> None:
        head = read_header(self.writer._descriptor)
        if head is not None and (head.rank, head.step) == (0, 3):
            time.sleep(1.5)
            raise OSError(errno.EIO, "injected")
        reserve(self, rank_manifest_bytes, is_cuda)

    _BufferedMemoryFile.reserve = dying  # type: ignore[method-assign]


def rank_0_is_slow_to_exchange_and_rank_1_fails_in_step_4() -> None:
    exchange = PartnerReplicator.replicate

    def slow(self: PartnerReplicator, path: str | None) -> None:
        if self._rank == 0:
            time.sleep(3)
        exchange(self, path)

    PartnerReplicator.replicate = slow  # type: ignore[method-assign]
    rank_1_fails_in_step_4()


def rank_1_breaks_off_the_exchange() -> None:
    """Without a word to rank 0, which is left waiting for it."""
    exchange = PartnerReplicator.replicate

    def broken(self: PartnerReplicator, path: str | None) -> None:
        if self._rank == 1:
            self.failure_reason = "injected"
        else:
            exchange(self, path)

    PartnerReplicator.replicate = broken  # type: ignore[method-assign]


def a_weight_of_rank_1_flips_a_bit_in_step_4() -> None:
    _flip_after(4, 1, lambda trainer: next(iter(trainer.state.weight_tensors().values())))


def a_moment_of_rank_0_flips_a_bit_in_step_4() -> None:
    def moment(trainer: Trainer) -> torch.Tensor:
        tensors = trainer.state.checkpoint_tensors()
        return next(tensor for name, tensor in tensors.items() if name.startswith("optimizer."))

    _flip_after(4, 0, moment)


def the_gradient_of_step_20_is_huge() -> None:
    finish_step = Trainer.finish_step

    def exploding(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        if self.state.step + 1 == 20:
            for gradient in self.state.named_optimizer.gradients():
                local_tensor(gradient).mul_(1e6)
        return finish_step(self, *arguments, **keywords)

    Trainer.finish_step = exploding  # type: ignore[method-assign]


def each_rank_notes_its_number_in_a_buffer() -> None:
    right = Trainer.__init__

    def start(self: Trainer, *arguments: Any, **keywords: Any) -> None:
        module = arguments[4].model_parts[0]
        module.register_buffer("seen", torch.zeros(3))
        right(self, *arguments, **keywords)
        module.get_buffer("seen").fill_(self.worker.rank)

    Trainer.__init__ = start  # type: ignore[method-assign]


def _flip_after(step: int, rank: int, choose: Callable[[Trainer], torch.Tensor]) -> None:
    """After the update of `step`, before anything else sees the weights."""
    finish_step = Trainer.finish_step

    def flipping(self: Trainer, *arguments: Any, **keywords: Any) -> Any:
        agreement = finish_step(self, *arguments, **keywords)
        if (self.state.step, self.worker.rank) == (step, rank):
            flip_bit(choose(self))
        return agreement

    Trainer.finish_step = flipping  # type: ignore[method-assign]


def flip_bit(tensor: torch.Tensor, bit: int = 3) -> None:
    """Flip a bit of the first byte of the part of a tensor that this rank holds."""
    local_tensor(tensor).view(-1).view(torch.uint8)[0] ^= 1 << bit


def no_room_for_checkpoints() -> None:
    """Files end at 20 KB from the first save on, and what became of it is known when anybody asks."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save, poll = Checkpointer.save, Checkpointer.poll

    def save_without_room(self: Checkpointer, *arguments: Any, **keywords: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        save(self, *arguments, **keywords)

    def wait_and_poll(self: Checkpointer) -> list[SaveResult]:
        self._join_thread()
        return poll(self)

    Checkpointer.save = save_without_room  # type: ignore[method-assign, assignment]
    Checkpointer.poll = wait_and_poll  # type: ignore[method-assign]
