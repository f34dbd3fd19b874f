"""Update rules of the rows of embedding tables, by `train.embedding_optimizer`.

On the rows that a step uses they are the rules of `torch.optim`. The cost of an update does not depend on the
size of a table, and other rows keep their vectors, their state and their weight decay for later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

Factor = Tensor | float
"""One number for all rows of an update, or one for each, (used, 1)."""


@dataclass(frozen=True)
class RowUpdate:
    """Update of the rows that a step uses, each once."""

    rows: Tensor
    """Rows, (used,) int64."""
    gradient: Tensor
    """Gradient of each, (used, width)."""
    rate: Factor
    """Learning rate."""
    decay: Factor
    """Weight decay."""
    step: int
    """Number of the update, from 1."""
    betas: tuple[float, float]
    epsilon: float


def _sgd(update: RowUpdate, states: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG001  # it has none
    return update.gradient


def _adagrad(update: RowUpdate, states: Mapping[str, Tensor]) -> Tensor:
    """Adagrad (Duchi et al. 2011) with one sum of squares for each element."""
    total = states["sum"].index_select(0, update.rows).addcmul_(update.gradient, update.gradient)
    states["sum"].index_copy_(0, update.rows, total)
    return update.gradient / total.sqrt_().add_(update.epsilon)


def _rowwise_adagrad(update: RowUpdate, states: Mapping[str, Tensor]) -> Tensor:
    """Adagrad with one sum for each row, of the mean square of its gradient, as FBGEMM's."""
    total = states["row_sum"].index_select(0, update.rows) + update.gradient.square().mean(1)
    states["row_sum"].index_copy_(0, update.rows, total)
    return update.gradient / total.sqrt_().add_(update.epsilon)[:, None]


def _adam(update: RowUpdate, states: Mapping[str, Tensor]) -> Tensor:
    """Adam (Kingma and Ba 2015); bias is corrected by the number of all updates, as in `SparseAdam`."""
    first, second = update.betas
    mean = states["exp_avg"].index_select(0, update.rows).lerp_(update.gradient, 1 - first)
    square = states["exp_avg_sq"].index_select(0, update.rows).mul_(second)
    square.addcmul_(update.gradient, update.gradient, value=1 - second)
    states["exp_avg"].index_copy_(0, update.rows, mean)
    states["exp_avg_sq"].index_copy_(0, update.rows, square)
    scale = math.sqrt(1 - second**update.step)
    return mean / (1 - first**update.step) / (square.sqrt_() / scale + update.epsilon)


@dataclass(frozen=True)
class RowRule:
    """Rule of one optimizer."""

    direction: Callable[[RowUpdate, Mapping[str, Tensor]], Tensor]
    """Function of an update and the states that returns what the rate is multiplied by, (used, width)."""
    states: tuple[str, ...] = ()
    """States with one element for each of a table."""
    row_states: tuple[str, ...] = ()
    """States with one element for each row."""
    couples_decay: bool = True
    """True if weight decay is added to the gradient; false if it shrinks the row itself."""

    def state_elements(self, width: int) -> int:
        """Return the elements of state of one row."""
        return len(self.states) * width + len(self.row_states)

    def new_states(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the states of rows (rows, width) before their first update."""
        return {name: torch.zeros_like(matrix) for name in self.states} | {
            name: matrix.new_zeros(len(matrix)) for name in self.row_states
        }

    def apply(self, matrix: Tensor, states: Mapping[str, Tensor], update: RowUpdate) -> None:
        """Update rows of a matrix (rows, width) and their states in place."""
        vectors = matrix.index_select(0, update.rows)  # on CPUs faster than by brackets, as index_copy_ is
        if isinstance(update.decay, Tensor) or update.decay != 0:
            if self.couples_decay:
                update = replace(update, gradient=update.gradient + update.decay * vectors)
            else:
                vectors = vectors * (1 - update.rate * update.decay)
        matrix.index_copy_(0, update.rows, vectors - update.rate * self.direction(update, states))


ROW_RULES: Mapping[str, RowRule] = MappingProxyType(
    {
        "sgd": RowRule(_sgd),
        "adagrad": RowRule(_adagrad, states=("sum",)),
        "rowwise_adagrad": RowRule(_rowwise_adagrad, row_states=("row_sum",)),
        "adam": RowRule(_adam, states=("exp_avg", "exp_avg_sq"), couples_decay=False),
    }
)
"""Rules by the value of `train.embedding_optimizer`."""
