"""Rows of embedding tables for raw ids: an admitted id has a row of its own, all others share the first ones.

The log of a run is known when it begins, and so are the ids that it admits: they depend on the log and on the
ids of the run before, and on no seed, rank or layout. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from wanma.data.interactions.log import Bags, InteractionLog
from wanma.data.sampling.permutation import mix_bits
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection

TABLE_IDS = "ids."
"""Prefix of the name of a table's `AdmittedIds.table` in checkpoints."""
_HASH_KEY = np.uint64(int.from_bytes(hashlib.blake2b(b"shared rows", digest_size=8).digest(), "little"))


@dataclass(frozen=True, eq=False)
class AdmittedIds:
    """Ids that have rows of their own in an embedding table."""

    table: NDArray[np.int64]
    """Id of each row, and number of runs since the last that held it, (rows, 2).

    The rows that other ids share come first; their id is -1.
    """

    @classmethod
    def none(cls, shared_rows: int) -> AdmittedIds:
        """Return those of a table that has shared rows only."""
        return cls(np.tile(np.array([-1, 0]), (shared_rows, 1)))

    @cached_property
    def shared(self) -> int:
        """Number of shared rows."""
        return int((self.table[:, 0] < 0).sum())

    def rows_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each id, (ids,): its own, else a shared one by a hash of the id."""
        sorted_ids, order = self._sorted
        rows = (mix_bits(ids.astype(np.uint64), _HASH_KEY) % np.uint64(self.shared)).astype(np.int64)
        if len(sorted_ids):
            places = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
            is_own = sorted_ids[places] == ids
            rows[is_own] = self.shared + order[places[is_own]]
        return rows

    @cached_property
    def _sorted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        own = self.table[self.shared :, 0]
        order = np.argsort(own, kind="stable")
        return own[order], order

    def admit(
        self, ids: NDArray[np.int64], max_rows: int, min_count: int = 1, evict_after_runs: int | None = None
    ) -> AdmittedIds:
        """Return these ids and new ones, at the end of the table or in the place of others.

        New ids come in the order of their counts, highest first; of equal ones in that of their first use.

        Args:
            ids: ids of the training rows, in their order, as often as they come, (uses,).
            max_rows: maximum rows of the table, with the shared ones.
            evict_after_runs: runs without an id after which a new one may have its row, where none is left;
                None: never.
        """
        found, first, counts = np.unique(ids, return_index=True, return_counts=True)
        table = self.table.copy()
        table[self.shared :, 1] += 1
        table[np.isin(table[:, 0], found), 1] = 0
        is_new = (counts >= min_count) & ~np.isin(found, table[:, 0])
        new = found[is_new][np.lexsort((first[is_new], -counts[is_new]))]
        added, waiting = np.split(new, [max(max_rows - len(table), 0)])
        if evict_after_runs is not None:
            unused = np.flatnonzero(table[:, 1] >= evict_after_runs)
            unused = unused[np.argsort(-table[unused, 1], kind="stable")][: len(waiting)]
            table[unused, 0], table[unused, 1] = waiting[: len(unused)], 0
        return AdmittedIds(np.concatenate([table, np.stack([added, np.zeros_like(added)], 1)]))


@dataclass(frozen=True)
class Admission:
    """Log whose ids are rows of tables, and the ids that have rows of their own, by table."""

    log: InteractionLog
    ids: Mapping[str, AdmittedIds]
    reassigned_rows: Mapping[str, NDArray[np.int64]]
    """Rows by table that had another id before: what was learned in them is not the new id's."""
    notes: tuple[str, ...]
    """Sentences for the user about tables without a row left."""


def admit_ids(
    log: InteractionLog,
    train: NDArray[np.int64],
    section: DataSection,
    known: Mapping[str, NDArray[np.int64]],
) -> Admission:
    """Admit the ids of the training rows to the tables of `data.interactions.admit_rows`.

    Args:
        known: by table `AdmittedIds.table` of the run before.

    Raises:
        JobError: the job has fewer rows, or other shared ones, than the run before.
    """
    keys, names = section.interactions, section.columns
    user, item = names.table_name("user"), names.table_name("item")
    admitted: dict[str, AdmittedIds] = {}
    reassigned, notes = dict[str, NDArray[np.int64]](), list[str]()
    for name in names.table_names:
        if (max_rows := keys.admit_rows_of(name)) is None:
            continue
        before = AdmittedIds(known[name]) if name in known else AdmittedIds.none(keys.shared_rows)
        _check_known(name, before, max_rows, keys.shared_rows)
        columns = {user: log.users, item: log.items}
        ids = columns[name][train] if name in columns else log.features[name].take(train)[0]
        after = before.admit(ids, max_rows, keys.admit_count, keys.evict_after_runs)
        admitted[name] = after
        reassigned[name] = np.flatnonzero(after.table[: len(before.table), 0] != before.table[:, 0])
        sharing = int((after.rows_of(np.unique(ids)) < after.shared).sum())
        if len(after.table) == max_rows and sharing:
            notes.append(
                f"data.interactions.admit_rows: table '{name}' has no row left of {max_rows:,}; {sharing:,} "
                f"ids share {after.shared:,} rows"
            )

    def rows(name: str, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return admitted[name].rows_of(ids) if name in admitted else ids

    mapped = replace(
        log,
        users=rows(user, log.users),
        items=rows(item, log.items),
        features={name: Bags(rows(name, bags.ids), bags.starts) for name, bags in log.features.items()},
    )
    return Admission(mapped, admitted, reassigned, tuple(notes))


def _check_known(name: str, known: AdmittedIds, max_rows: int, shared_rows: int) -> None:
    if known.shared != shared_rows:
        raise JobError(
            f"data.interactions.shared_rows = {shared_rows}, and table '{name}' of checkpoint.start_from has "
            f"{known.shared}",
            f"set data.interactions.shared_rows = {known.shared}",
        )
    if len(known.table) > max_rows:
        raise JobError(
            f"data.interactions.admit_rows: table '{name}' may have {max_rows:,} rows, and that of "
            f"checkpoint.start_from has {len(known.table):,}",
            f"set data.interactions.admit_rows for '{name}' to {len(known.table)} or more",
        )
