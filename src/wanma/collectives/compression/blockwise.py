"""Gradients in 8 bits: a codec of `two_phase`."""

from __future__ import annotations

import torch
from torch import Tensor

from wanma.collectives.compression.pieces import ALIGNMENT

_LARGEST = 127


class BlockwiseInt8:
    """Each block of 256 has a scale of its own, its largest absolute value over 127, so that an outlier costs
    its own block its precision and no other (Dettmers et al. 2022, section 2.1; steps here are even, theirs
    grow with the value). Element and share of the scale take 1 + 4/256 bytes.

    What rounding loses is added to the next gradient (Seide et al. 2014, eq. 1 and 2). A block with a
    value that is not finite comes back without one that is.
    """

    keeps_error = True

    def encode(self, values: Tensor) -> Tensor:
        blocks = values.unflatten(1, (-1, ALIGNMENT))
        # Of a block of zeros the smallest normal number: its inverse is finite.
        scales = (blocks.abs().amax(2) / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (blocks * scales.reciprocal()[:, :, None]).round_().to(torch.int8).flatten(1)
        return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], 1)

    def decode(self, encoded: Tensor) -> Tensor:
        blocks = encoded.shape[1] // (ALIGNMENT + 4)
        levels = encoded[:, : ALIGNMENT * blocks].view(torch.int8).unflatten(1, (-1, ALIGNMENT))
        scales = encoded[:, ALIGNMENT * blocks :].view(torch.float32)
        values: Tensor = (levels.to(torch.float32) * scales[:, :, None]).flatten(1)
        return values
