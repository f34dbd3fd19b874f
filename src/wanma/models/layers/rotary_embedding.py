"""Rotary position embedding (Su et al. 2021, section 3.2.2)."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryFrequencies:
    """Rotations of each pair of a head's elements at each position, in two views of one storage.

    A plain class and no dataclass or tuple: FSDP searches those to cast a block's inputs to
    bf16, in which angles of far positions would be lost.

    Attributes:
        complex_factors: unit complex numbers (sequence, 1, width / 2) or (rows, sequence, 1, width / 2).
        cosine_sine: the same as reals, with a last dim of 2.
    """

    def __init__(self, angles: Tensor) -> None:
        self.complex_factors = torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
        self.cosine_sine = torch.view_as_real(self.complex_factors)


def compute_rotary_frequencies(
    positions: Tensor, width: int, theta: float, dtype: torch.dtype
) -> RotaryFrequencies:
    """Compute the rotations of `width` elements at each position.

    Args:
        positions: (sequence,) or (rows, sequence).
        width: elements of a head, an even number.
        theta: base of the frequencies.
        dtype: of the hidden states; angles have at least fp32.
    """
    compute_dtype = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, width, 2, dtype=compute_dtype, device=positions.device) / width
    angles = positions.to(compute_dtype).unsqueeze(-1) * theta**-exponents
    return RotaryFrequencies(angles)


def apply_rotary_embedding(x: Tensor, rotary: RotaryFrequencies) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dim, as the weights that Meta publishes expect.

    Args:
        x: (rows, sequence, heads, width).
        rotary: the rotations.
    """
    pairs = x.to(rotary.cosine_sine.dtype).unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():
        # Inductor fuses real arithmetic only; in eager mode one complex product is three times faster.
        even, odd = pairs.unbind(-1)
        cosine, sine = rotary.cosine_sine.unbind(-1)
        rotated = torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotary.complex_factors)
    return rotated.flatten(-2).to(x.dtype)
