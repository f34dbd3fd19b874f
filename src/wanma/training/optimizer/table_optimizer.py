"""Optimizers of embedding tables, which read and change the rows that a step uses, and no others.

Their rules are those of `wanma.models.recommender.row_updates`. For SGD and Adagrad without weight decay that
is the dense rule; Adam's dense rule would move unused rows by their moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from wanma.job.errors import JobError
from wanma.job.sections.train import TrainSection
from wanma.models.recommender.row_updates import ROW_RULES, Factor, RowUpdate
from wanma.models.structure.parameter_roles import find_parameter_group
from wanma.parallel.embedding.fused_updates import update_rows
from wanma.parallel.embedding.sharded_embedding import ShardedEmbedding


def table_rates(name: str, train: TrainSection) -> tuple[float, float]:
    """Return the learning-rate scale and the weight decay of a table's parameter.

    Raises:
        JobError: a parameter group freezes the table.
    """
    group = find_parameter_group(name, train.parameter_groups)
    if group is None:
        return 1.0, 0.0
    if group.frozen:
        raise JobError(
            f"train.parameter_groups: match = '{group.match}' freezes table '{name}', which "
            "train.embedding_optimizer updates",
            "set learning_rate_scale = 0 for it, or unset train.embedding_optimizer and parallel.embedding",
        )
    return group.learning_rate_scale, group.weight_decay or 0.0


def _common_factor(factors: Sequence[float], matrix: Tensor) -> Factor:
    """Return the one factor of all tables, or one for each, (tables,), of the type and device of a matrix."""
    return factors[0] if len(set(factors)) == 1 else matrix.new_tensor(factors)


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
        self._train, self._rule = train, train.embedding_optimizer
        rule = ROW_RULES[train.embedding_optimizer]
        self._states = embedding.allocate_states(rule.states, rule.row_states)
        matrix = embedding.matrix
        stored_on = matrix.device if embedding.cache is None else torch.device("cpu")
        self._changed = torch.zeros(embedding.layout.row_count, dtype=torch.bool, device=stored_on)
        rates = [
            table_rates(embedding.parameter_names[rows.table], train) for rows in embedding.layout.local_rows
        ]
        self._ends = torch.tensor(
            [rows.start + rows.count for rows in embedding.layout.local_rows], device=matrix.device
        )
        self._scale, self._decay = (_common_factor(values, matrix) for values in zip(*rates, strict=True))

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
        rate, decay = (
            self._of_rows(factor, gradient.rows) for factor in (self._scale * learning_rate, self._decay)
        )
        train, rows = self._train, self.embedding.matrix_rows(gradient.rows)
        update = RowUpdate(rows, gradient.values, rate, decay, step, train.betas, train.epsilon)
        update_rows(self._rule, self.embedding.matrix, self._states, update)
        self._changed.index_fill_(0, gradient.rows.to(self._changed.device), True)

    def _of_rows(self, factor: Factor, rows: Tensor) -> Factor:
        """Return the factor of each of some rows, (rows, 1), from that of each table, or the one of all."""
        if not isinstance(factor, Tensor):
            return factor
        return factor[torch.bucketize(rows, self._ends, right=True), None]

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
