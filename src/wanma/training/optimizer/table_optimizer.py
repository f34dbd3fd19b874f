"""Optimizers of embedding tables, which read and change the rows that a step uses, and no others.

On these rows they are the rules of `torch.optim`; the cost of an update does not depend on the size of a
table. A row that a step does not use keeps its vector, its state and its weight decay for later. For SGD and
Adagrad without weight decay that is the dense rule; Adam's dense rule would move the row by its moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wanma.job.errors import JobError
from wanma.job.sections.train import TrainSection
from wanma.models.structure.parameter_roles import find_parameter_group
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding


@dataclass(frozen=True)
class _RowUpdate:
    """Update of the rows that a step uses, each once."""

    rows: Tensor
    """Rows, (used,) int64."""
    gradient: Tensor
    """Gradient of each, (used, width)."""
    rate: Tensor
    """Learning rate of each, (used, 1)."""
    step: int
    """Number of the update, from 1."""
    train: TrainSection


def _sgd(update: _RowUpdate, states: dict[str, Tensor]) -> Tensor:  # noqa: ARG001  # it has none
    return update.gradient


def _adagrad(update: _RowUpdate, states: dict[str, Tensor]) -> Tensor:
    """Adagrad (Duchi et al. 2011) with one sum of squares for each element."""
    total = states["sum"][update.rows].addcmul_(update.gradient, update.gradient)
    states["sum"][update.rows] = total
    return update.gradient / (total.sqrt_() + update.train.epsilon)


def _rowwise_adagrad(update: _RowUpdate, states: dict[str, Tensor]) -> Tensor:
    """Adagrad with one sum for each row, of the mean square of its gradient, as FBGEMM's."""
    total = states["row_sum"][update.rows] + update.gradient.square().mean(1)
    states["row_sum"][update.rows] = total
    return update.gradient / (total.sqrt_() + update.train.epsilon)[:, None]


def _adam(update: _RowUpdate, states: dict[str, Tensor]) -> Tensor:
    """Adam (Kingma and Ba 2015); bias is corrected by the number of all updates, as in `SparseAdam`."""
    first, second = update.train.betas
    mean = states["exp_avg"][update.rows].lerp_(update.gradient, 1 - first)
    square = states["exp_avg_sq"][update.rows].mul_(second)
    square.addcmul_(update.gradient, update.gradient, value=1 - second)
    states["exp_avg"][update.rows], states["exp_avg_sq"][update.rows] = mean, square
    scale = math.sqrt(1 - second**update.step)
    return mean / (1 - first**update.step) / (square.sqrt_() / scale + update.train.epsilon)


@dataclass(frozen=True)
class _Rule:
    """Rule of one optimizer."""

    direction: Callable[[_RowUpdate, dict[str, Tensor]], Tensor]
    """Function of an update and the states that returns what the rate is multiplied by, (used, width)."""
    states: tuple[str, ...] = ()
    """States with one element for each of a table."""
    row_states: tuple[str, ...] = ()
    """States with one element for each row."""
    couples_decay: bool = True
    """True if weight decay is added to the gradient; false if it shrinks the row itself."""


_RULES = {
    "sgd": _Rule(_sgd),
    "adagrad": _Rule(_adagrad, states=("sum",)),
    "rowwise_adagrad": _Rule(_rowwise_adagrad, row_states=("row_sum",)),
    "adam": _Rule(_adam, states=("exp_avg", "exp_avg_sq"), couples_decay=False),
}


class TableOptimizer:
    """Optimizer of the tables of one `ShardedEmbedding`.

    Args:
        embedding: tables with memory.
        train: `[train]` of the job. Of a parameter group's keys a table takes all; `train.weight_decay` does
            not apply to tables.

    Raises:
        JobError: a parameter group freezes a table.
    """

    def __init__(self, embedding: ShardedEmbedding, train: TrainSection) -> None:
        assert train.embedding_optimizer is not None  # by `planner.rules.capabilities`
        self.embedding = embedding
        self._train, self._rule = train, _RULES[train.embedding_optimizer]
        self._states = embedding.allocate_states(self._rule.states, self._rule.row_states)
        matrix = embedding.matrix
        self._changed = torch.zeros(embedding.layout.row_count, dtype=torch.bool, device=matrix.device)
        groups = [
            find_parameter_group(embedding.parameter_names[rows.table], train.parameter_groups)
            for rows in embedding.layout.local_rows
        ]
        self._ends = torch.tensor(
            [rows.start + rows.count for rows in embedding.layout.local_rows], device=matrix.device
        )
        for rows, group in zip(embedding.layout.local_rows, groups, strict=True):
            if group is not None and group.frozen:
                raise JobError(
                    f"train.parameter_groups: match = '{group.match}' freezes table '{rows.table}', "
                    "which parallel.embedding places",
                    "set learning_rate_scale = 0 for it, or parallel.embedding = 'dense'",
                )
        scales = [group.learning_rate_scale if group is not None else 1.0 for group in groups]
        decays = [(group.weight_decay or 0.0) if group is not None else 0.0 for group in groups]
        self._scales, self._decays = (
            torch.tensor(values, dtype=matrix.dtype, device=matrix.device) for values in (scales, decays)
        )

    @torch.no_grad()
    def step(self, learning_rate: float, step: int) -> None:
        """Update the rows that have a gradient.

        Args:
            learning_rate: learning rate before the scales of parameter groups.
            step: number of the update, from 1.
        """
        gradient = self.embedding.gradient
        if gradient is None or not len(gradient.rows):
            return
        tables = torch.bucketize(gradient.rows, self._ends, right=True)
        rates, decays = (values[tables, None] for values in (self._scales * learning_rate, self._decays))
        rows = self.embedding.matrix_rows(gradient.rows)
        values, matrix = gradient.values, self.embedding.matrix
        vectors = matrix[rows]
        if self._rule.couples_decay:
            values = values + decays * vectors
        else:
            vectors = vectors * (1 - rates * decays)
        direction = self._rule.direction(_RowUpdate(rows, values, rates, step, self._train), self._states)
        matrix[rows] = vectors - rates * direction
        self._changed[gradient.rows] = True

    def changed_rows(self) -> dict[str, Tensor]:
        """Return whether each row of this rank has changed since `reset_changed_rows`, by parameter name."""
        names = self.embedding.parameter_names
        return {
            names[rows.table]: self._changed[rows.start : rows.start + rows.count]
            for rows in self.embedding.layout.local_rows
        }

    def reset_changed_rows(self) -> None:
        """Count all rows as unchanged: they have been saved."""
        self._changed.zero_()

    def state_entries(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter name, key, state), as `NamedOptimizer.state_entries`."""
        names = self.embedding.parameter_names
        for key, state in self.embedding.stored_states.items():
            for table, view in self.embedding.table_views(state).items():
                yield names[table], key, view
