"""For runs of a test: what a machine without the hardware can only pretend to do."""

from __future__ import annotations

from functools import partial


def fp8() -> None:
    """Compute what products in fp8 would give."""
    from wanma.parallel import parallelize
    from wanma.parallel.precision.float8 import apply_float8

    parallelize.apply_float8 = partial(apply_float8, emulate=True)  # type: ignore[attr-defined]
