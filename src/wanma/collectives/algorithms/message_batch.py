"""Messages between ranks of a process group that are in flight at the same time."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from wanma.job.errors import WanmaError


class MessageBatch:
    """Messages of one rank, waited for together.

    On a CPU each message starts at once. On other devices all start together in `wait`, because NCCL runs the
    messages between two ranks in their order: two ranks that both receive first would wait forever.

    Args:
        group: process group; peers are ranks of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._in_flight: list[tuple[int, bool, Tensor, dist.Work]] = []
        """Messages that have started, as (peer, whether it is sent, tensor, handle)."""
        self._waiting: list[dist.P2POp] = []

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> None:
        """Send `tensor`, which stays as it is until `wait` returns; nothing is sent of an empty one."""
        self._add(tensor, peer, tag, is_sent=True)

    def receive(self, tensor: Tensor, peer: int, tag: int = 0) -> Tensor:
        """Receive into `tensor`, which is complete after `wait`, and return it."""
        self._add(tensor, peer, tag, is_sent=False)
        return tensor

    def wait(self) -> None:
        """Wait until all messages have been sent and received.

        Raises:
            WanmaError: a peer is gone or does not answer; names its rank.
        """
        in_flight, self._in_flight = self._in_flight, []
        waiting, self._waiting = self._waiting, []
        for work in dist.batch_isend_irecv(waiting) if waiting else ():
            work.wait()
        for peer, is_sent, _, work in in_flight:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._peer_error(peer, is_sent, error) from error

    def _add(self, tensor: Tensor, peer: int, tag: int, *, is_sent: bool) -> None:
        if not tensor.numel():
            return
        if tensor.device.type != "cpu":
            start = dist.isend if is_sent else dist.irecv
            self._waiting.append(dist.P2POp(start, tensor, group=self._group, tag=tag, group_peer=peer))
            return
        begin = self._group.send if is_sent else self._group.recv
        try:
            self._in_flight.append((peer, is_sent, tensor, begin([tensor], peer, tag)))
        except RuntimeError as error:
            raise self._peer_error(peer, is_sent, error) from error

    def _peer_error(self, peer: int, is_sent: bool, error: RuntimeError) -> WanmaError:
        peer_rank, own_rank = (dist.get_global_rank(self._group, rank) for rank in (peer, self._group.rank()))
        failure = "receives nothing from" if is_sent else "sends nothing to"
        return WanmaError(
            f"rank {peer_rank} {failure} rank {own_rank}: {error}",
            f"read the end of logs/rank-{peer_rank}.log of the run directory, and check the network between "
            "the two nodes",
        )
