"""Data set of an interaction log: rows of user, candidate items and features."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset, InputKind, make_batch
from wanma.data.index.layout_file import array_bytes
from wanma.data.interactions.admitted_ids import admit_ids
from wanma.data.interactions.log import InteractionLog, read_log
from wanma.data.sampling.order import SampleOrder, Shuffle
from wanma.data.sampling.permutation import IndexArray, mix_bits, permute_indices
from wanma.data.text.encoding_task import describe_bad_rows
from wanma.job.errors import JobError
from wanma.job.sections.data import DataSection
from wanma.job.sections.recommender import InteractionSizes

_DESCRIBED_BAD_ROWS = 20
_FOLDS_KEY = "interaction folds"


class InteractionDataset(BatchedDataset):
    """Data set of interactions, whose batches have keywords instead of inputs.

    The keywords are the model's features, by the names of columns:

    - users (rows,) and candidate items (rows, 1 + negatives), int64; the first candidate is the row's own;
    - further features: the ids of all rows, and with the suffix `.offsets` the start of each row's;
    - `dense` (rows, features) float32;
    - for clicks `log_probability` (rows, candidates): of a candidate's draw as a negative;
    - in validation of `leave_last` clicks `seen` (rows, items): a user's items in training, filled with -1.

    Targets are ratings, or clicks of the first candidates, (rows,) float32.

    Args:
        known_ids: by table the ids that have rows in the checkpoint to start from, as of `AdmittedIds.table`.
    """

    input_kind: ClassVar[InputKind] = "interactions"
    targets_per_sample = 1
    copies_from_memory = True
    interaction_sizes: InteractionSizes

    def __init__(
        self,
        section: DataSection,
        seed: int,
        total_samples: int,
        known_ids: Mapping[str, NDArray[np.int64]] = MappingProxyType({}),
    ) -> None:
        raw = read_log(section)
        self._train, self._validation = _split_rows(raw, section)
        self._admission = admit_ids(raw, self._train, section, known_ids)
        log = self._admission.log
        self._log, self._keys = log, section.interactions
        self.table_ids = {name: torch.from_numpy(ids.table) for name, ids in self._admission.ids.items()}
        self.reassigned_rows = self._admission.reassigned_rows
        self._user, self._item = section.columns.table_name("user"), section.columns.table_name("item")
        self.damaged_files = log.damaged
        self._total = total_samples
        self.seed = seed
        self.train_samples, self.validation_samples = len(self._train), len(self._validation)
        self.order: SampleOrder = SampleOrder.of_source(self.train_samples, Shuffle.of_job(section), seed)
        self.interaction_sizes = self._sizes()
        self.ranks_items = self._keys.target == "click" and self._keys.split == "leave_last"
        self.top_k = self._keys.top_k
        self.has_negatives = self._keys.negatives > 0 or self._keys.positive_from is not None
        """True if some rows or candidates are no clicks."""
        items = log.items[self._train]
        power = self._keys.negative_power if self._keys.negatives else 1.0
        self._draws = ItemDraws(items, self.interaction_sizes.tables[self._item], power, seed)
        self._user_ids = raw.users  # several may share a row
        seen = self._train if self.ranks_items else self._train[:0]
        by_user = np.argsort(raw.users[seen], kind="stable")
        self._seen, self._seen_users = log.items[seen][by_user], raw.users[seen][by_user]
        self.fingerprint = self._hash()

    def describe(self) -> dict[str, Any]:
        tables = self.interaction_sizes.tables
        return {
            "kind": self.input_kind,
            "fingerprint": self.fingerprint,
            "tables": dict(tables),
            "admitted_ids": {name: len(one.table) - one.shared for name, one in self._admission.ids.items()},
            "train_samples": self.train_samples,
            "validation_samples": self.validation_samples,
            "epochs": self._total / self.train_samples,
            "bad_rows": {
                "count": len(self._log.bad_rows),
                "listed": self._log.bad_rows[:_DESCRIBED_BAD_ROWS],
            },
        }

    @property
    def bad_data_note(self) -> str:
        notes = [super().bad_data_note]
        if rows := self._log.bad_rows:
            notes += [f"{len(rows):,} bad rows of the interactions were left out: {describe_bad_rows(rows)}"]
        return "; ".join(filter(None, [*notes, *self._admission.notes]))

    def sample_name(self, sample_index: int) -> str:
        return self._log.place(int(self._train[self.order.rows(np.array([sample_index]))[0]]))

    def _train_batch(self, sample_indices: IndexArray) -> Batch:
        rows = self._train[self.order.rows(sample_indices)]
        return self._read(rows, sample_indices, is_validation=False)

    def _validation_batch(self, sample_indices: IndexArray, rows: IndexArray) -> Batch:
        return self._read(self._validation[rows], sample_indices, is_validation=True)

    def _read(self, rows: IndexArray, sample_indices: IndexArray, *, is_validation: bool) -> Batch:
        log, keys = self._log, self._keys
        users, candidates = log.users[rows], log.items[rows][:, None]
        keywords: dict[str, Tensor] = {self._user: torch.from_numpy(users)}
        if keys.negatives:
            purpose = "validation negatives" if is_validation else "negatives"
            # A validation sample is a row of the log, whatever the order in which it is evaluated.
            drawn = self._draws.draw(rows if is_validation else sample_indices, keys.negatives, purpose)
            candidates = np.concatenate([candidates, drawn], 1)
        keywords[self._item] = torch.from_numpy(candidates)
        if keys.target == "click":
            keywords["log_probability"] = torch.from_numpy(self._draws.log_probability[candidates])
        for name, bags in log.features.items():
            ids, offsets = bags.take(rows)
            keywords[name], keywords[f"{name}.offsets"] = torch.from_numpy(ids), torch.from_numpy(offsets)
        if log.dense.shape[1]:
            keywords["dense"] = torch.from_numpy(log.dense[rows])
        if is_validation and self.ranks_items:
            keywords["seen"] = torch.from_numpy(self._seen_items(self._user_ids[rows]))
        return make_batch((), torch.from_numpy(log.targets[rows]), sample_indices, keywords)

    def _seen_items(self, user_ids: IndexArray) -> IndexArray:
        starts, ends = (np.searchsorted(self._seen_users, user_ids, side) for side in ("left", "right"))
        positions = starts[:, None] + np.arange(max(int((ends - starts).max()), 1))
        is_own = positions < ends[:, None]
        return np.where(is_own, self._seen[np.minimum(positions, len(self._seen) - 1)], -1)

    def _sizes(self) -> InteractionSizes:
        log, keys = self._log, self._keys
        columns = {self._user: log.users, self._item: log.items}
        tables = {name: int(ids.max()) + 1 for name, ids in columns.items()}
        rows = {name: log.place(int(ids.argmax())) for name, ids in columns.items()}
        for name, bags in log.features.items():
            tables[name] = int(bags.ids.max(initial=0)) + 1
            if len(bags.ids):
                row = int(np.searchsorted(bags.starts, int(bags.ids.argmax()), side="right")) - 1
                rows[name] = log.place(row)
        admitted = self._admission.ids
        tables = {name: keys.hash_rows_of(name) or count for name, count in tables.items()}
        tables |= {name: len(ids.table) for name, ids in admitted.items()}
        bag_sizes = {
            name: math.ceil(len(bags.ids) / max(len(log.users), 1)) for name, bags in log.features.items()
        }
        mean = float(log.targets[self._train].mean()) if keys.target == "rating" else 0.0
        return InteractionSizes(
            self._user,
            self._item,
            tables,
            rows,
            bag_sizes,
            log.dense.shape[1],
            mean,
            keys.target,
            keys.negatives,
            {name: ids.shared for name, ids in admitted.items()},
        )

    def _hash(self) -> str:
        log, keys = self._log, self._keys
        settings = f"{keys.target} {keys.negatives} {keys.negative_power}"
        digest = hashlib.sha256(settings.encode())
        arrays: list[NDArray[Any]] = [log.users, log.items, log.targets, log.dense, self._train]
        arrays += [array for bags in log.features.values() for array in (bags.ids, bags.starts)]
        arrays += [ids.table for ids in self._admission.ids.values()]
        for array in arrays:
            digest.update(array_bytes(array))
        return digest.hexdigest()


class ItemDraws:
    """Draws of items in proportion to their count in training to a power.

    Args:
        power: 1: as often as in training; 0: all items alike.
    """

    def __init__(self, items: NDArray[np.int64], item_count: int, power: float, seed: int) -> None:
        counts = np.bincount(items, minlength=item_count).astype(np.float64)
        weights = np.power(counts, power) if power else np.ones(item_count)
        self._cumulative = np.cumsum(weights / weights.sum())
        self._seed = seed
        # An item that training lacks, and that validation scores, counts as if it had been there once.
        floored = np.power(np.maximum(counts, 1), power)
        self.log_probability = np.log(floored / weights.sum()).astype(np.float32)
        """Logarithm of the probability of each item, (items,)."""

    def draw(self, samples: IndexArray, count: int, purpose: str) -> NDArray[np.int64]:
        """Return `count` items for each sample, (samples, count), with replacement."""
        digest = hashlib.blake2b(f"{self._seed}:{purpose}".encode(), digest_size=8).digest()
        key = np.uint64(int.from_bytes(digest, "little"))
        numbers = np.arange(count).astype(np.uint64)
        positions = mix_bits(samples.astype(np.uint64)[:, None], key) + numbers
        uniform = (mix_bits(positions, key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        found = np.searchsorted(self._cumulative, uniform, side="right")
        return np.minimum(found, len(self._cumulative) - 1).astype(np.int64)


def _split_rows(log: InteractionLog, section: DataSection) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the training and the validation rows: rising, or with `split = "time"` in the order of time.

    Raises:
        JobError: one of them has none.
    """
    keys, rows = section.interactions, np.arange(len(log))
    if keys.split == "random":
        is_validation = permute_indices(rows, len(rows), _FOLDS_KEY) % keys.folds == keys.fold
    elif keys.split == "leave_last":
        is_validation = _is_last(log)
    else:
        rows = np.argsort(log.times, kind="stable")
        is_validation = np.arange(len(rows)) >= len(rows) - round(len(rows) * section.validation_fraction)
    if is_validation.all() or not (is_validation.any() or keys.split == "time"):
        raise JobError(
            f"data.interactions.split = '{keys.split}' leaves no rows for "
            f"{'training' if is_validation.all() else 'validation'} of {len(rows)}",
            "use another split, or more rows",
        )
    return rows[~is_validation], rows[is_validation]


def _is_last(log: InteractionLog) -> NDArray[np.bool_]:
    """Return whether a row is the last of its user, who has others; of equal times the later stored."""
    order = np.lexsort((np.arange(len(log)), log.times, log.users))
    users = log.users[order]
    ends = np.append(users[1:] != users[:-1], True)
    starts = np.insert(ends[:-1], 0, True)
    is_last = np.zeros(len(log), dtype=bool)
    is_last[order[ends & ~starts]] = True
    return is_last
