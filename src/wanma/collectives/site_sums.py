"""Sums over a few ranks with slow links between them, begun now and waited for later.

Whole, they are an all-reduce. Rounded, every rank sends what it rounded to all others, and each adds up what
all sent, in the order of the ranks and in full precision: a sum of rounded numbers is not rounded again, and
is the same on every rank. That is what a gather costs, which for two ranks is what an all-reduce does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.job.sections import OuterCompression

BLOCK = 256
"""Numbers that share a scale in 8 bits."""
_LARGEST = 127.0


class Sum:
    """One sum under way.

    Args:
        flat: (n,) floating point, of this rank; it becomes the sum, and is not to be touched until then.
        group: all of its ranks make the same sums in the same order.
        compression: what numbers are rounded to before they are sent.
    """

    def __init__(
        self, flat: Tensor, group: dist.ProcessGroup, compression: OuterCompression = "nothing"
    ) -> None:
        self._flat = flat
        self._work: dist.Work | None = None
        self._received: list[Tensor] = []
        self._read: Callable[[Tensor, int], Tensor] | None = None
        if not flat.numel():
            return
        if compression != "nothing":
            pack, self._read = _FORMATS[compression]
            packed = pack(flat)
            self._received = [torch.empty_like(packed) for _ in range(group.size())]
            if group.size() == 1:
                self._received = [packed]
            else:
                self._work = dist.all_gather(self._received, packed, group=group, async_op=True)
        elif group.size() > 1:
            self._work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> Tensor:
        """(n,) the sum over the ranks; a second call returns it again."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._read is not None:
            self._flat.zero_()
            for packed in self._received:
                self._flat.add_(self._read(packed, self._flat.numel()))
            self._received, self._read = [], None
        return self._flat


def _pack_bf16(flat: Tensor) -> Tensor:
    return flat.to(torch.bfloat16).view(torch.uint8)


def _read_bf16(packed: Tensor, count: int) -> Tensor:  # noqa: ARG001  # one signature for all formats
    return packed.view(torch.bfloat16)


def _pack_int8(flat: Tensor) -> Tensor:
    """Bytes of the rounded numbers, whole blocks, and behind them their scales in fp32."""
    blocks = torch.nn.functional.pad(flat.float(), (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1) / _LARGEST
    # A block of zeros has any scale; one that is not finite stays so.
    rounded = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)).round().nan_to_num(0.0)
    return torch.cat([rounded.to(torch.int8).view(-1).view(torch.uint8), scales.view(torch.uint8)])


def _read_int8(packed: Tensor, count: int) -> Tensor:
    size = -(-count // BLOCK) * BLOCK
    numbers = packed[:size].view(torch.int8).view(-1, BLOCK).float()
    scales = packed[size:].clone().view(torch.float32)
    return (numbers * scales.unsqueeze(1)).view(-1)[:count]


_FORMATS: dict[OuterCompression, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "bf16": (_pack_bf16, _read_bf16),
    "int8": (_pack_int8, _read_int8),
}
