"""Copies of this rank's images on another node, and this node's files for the images of others."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from wanma.checkpoint.image import ImageFile
from wanma.checkpoint.ring import host_of
from wanma.checkpoint.transfer import converse, receive_image, send_image
from wanma.job.errors import WanmaError
from wanma.job.worker import Images

_WITH_GLOO = 3
"""Times this thread's own share of a core, that an exchange takes with Gloo's thread: measured on loopback
with 256 MB each way (0.07 of 0.2 s)."""


class Partner:
    """What one rank sends and takes for each snapshot, in two files for each guest that are used in turn.

    If no rank begins a snapshot before all have finished their exchange of the one before, there is
    always one step of which every rank's image is whole both on its own node and on its partner.

    Args:
        images: whose `guests` this rank takes.
        ranks_by_node: how many ranks each node has.
        group: of all ranks, with Gloo; nothing else uses it, for this happens beside the training.

    Raises:
        WanmaError: a file for guests cannot be opened.
    """

    def __init__(
        self, images: Images, rank: int, ranks_by_node: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self.problem = ""
        """Why there are no copies any more; empty while there are."""
        self.processor_seconds = 0.0
        """Of a core, that the last exchange took, about."""
        self._rank, self._group = rank, group
        self._host = host_of(rank, ranks_by_node)
        try:
            self._guests = {
                guest: [ImageFile(path) for path in paths] for guest, paths in images.guests.items()
            }
        except OSError as error:
            raise WanmaError(
                f"rank {rank} cannot open the memory for other nodes' snapshots: {error}"
            ) from error

    def exchange(self, path: str | None) -> None:
        """Send this rank's image and take those of the guests; in a thread, on all ranks. Never raises.

        Args:
            path: None: this rank has made none. The others' come all the same.
        """
        began = time.thread_time()
        talks = [send_image(path, self._rank, self._host, self._group)]
        talks += [receive_image(files[0], guest, guest, self._group) for guest, files in self._guests.items()]
        try:
            problems = converse(talks)
        except Exception as error:  # a thread has nobody to raise to: whoever waits for it reads `problem`
            problems = [f"the exchange with other nodes broke off: {error}"]
        if problems:
            self.problem = self.problem or "; ".join(problems)
        else:
            for files in self._guests.values():
                files.reverse()
        self.processor_seconds = _WITH_GLOO * (time.thread_time() - began)

    @property
    def taken_bytes(self) -> int:
        """Memory that the guests' files take."""
        return sum(file.taken_bytes for files in self._guests.values() for file in files)

    def close(self) -> None:
        for file in (one for files in self._guests.values() for one in files):
            file.close()
        self._guests = {}
