"""Explanation of errors about float64, the dtype of numpy's and Python's numbers in datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wanma.data.batch import Batch
from wanma.job.errors import WanmaError


@contextmanager
def explain_float64_errors(batch: Batch, precision: str) -> Iterator[None]:
    """Explain an operation's error about float64 by the names of the batch's tensors of that dtype.

    Raises:
        WanmaError: instead of torch's own error, which it names.
    """
    try:
        yield
    except RuntimeError as error:
        names = float64_tensor_names(batch)
        about_types = "Double" in str(error) or "dtype" in str(error)
        if precision == "fp64" or not names or not about_types or isinstance(error, WanmaError):
            raise
        raise WanmaError(
            f"data: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} float64 (the default of "
            f"NumPy), but the model or the loss computes in {precision}: {error}",
            "convert to float32: array.astype('float32'), torch.tensor(number, dtype=torch.float32); or "
            "set train.precision = 'fp64'",
        ) from error


def float64_tensor_names(batch: Batch) -> list[str]:
    """Return the names of a batch's float64 tensors."""
    tensors = {
        **{f"input {number}": tensor for number, tensor in enumerate(batch.inputs)},
        **batch.keywords,
        **({"the target": batch.targets} if batch.named_targets is None else batch.named_targets),
    }
    return [name for name, tensor in tensors.items() if tensor.dtype == torch.float64]
