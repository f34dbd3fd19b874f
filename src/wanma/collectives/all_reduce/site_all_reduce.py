"""Asynchronous all-reduce between sites, optionally quantized.

Without compression it is a plain all-reduce. Quantized, every rank sends its encoded values to all others,
and each adds up all of them, in the order of the ranks and in full precision: a sum of rounded numbers is not
rounded again, and is the same on every rank. The cost is that of an all-gather, which for two ranks equals
that of an all-reduce.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.collectives.compression.bucket_tensors import align_up
from wanma.collectives.compression.compressor_table import make_codec
from wanma.collectives.compression.quantized import Codec
from wanma.job.sections.parallel import OuterCompression

CODECS: dict[OuterCompression, Codec] = {
    name: codec for name in get_args(OuterCompression) if (codec := make_codec(name)) is not None
}
"""Codec of each compression; a compression without one sends the values as they are."""


class SiteAllReduce:
    """Handle of one sum in flight.

    Args:
        flat: (n,) floating point, of this rank; it becomes the sum, and is not to be touched until then.
        group: process group; all of its ranks make the same sums in the same order.
        compression: format that values are rounded to before they are sent.
    """

    def __init__(
        self, flat: Tensor, group: dist.ProcessGroup, compression: OuterCompression = "none"
    ) -> None:
        self._flat = flat
        self._work: dist.Work | None = None
        self._gathered: list[Tensor] = []
        self._codec = CODECS.get(compression)
        if not flat.numel():
            return
        if self._codec is not None:
            whole_blocks = torch.nn.functional.pad(flat.float(), (0, align_up(len(flat)) - len(flat)))
            encoded = self._codec.encode(whole_blocks[None])
            self._gathered = [torch.empty_like(encoded) for _ in range(group.size())]
            if group.size() == 1:
                self._gathered = [encoded]
            else:
                self._work = dist.all_gather(self._gathered, encoded, group=group, async_op=True)
        elif group.size() > 1:
            self._work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the sum over the ranks and return it, (n,); a second call returns it again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._codec is not None and self._gathered:
            self._flat.zero_()
            for encoded in self._gathered:
                self._flat.add_(self._codec.decode(encoded)[0, : len(self._flat)])
            self._gathered = []
        return self._flat
