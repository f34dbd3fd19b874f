"""Keys and values of job files that have been renamed: the one table of old and new names.

A job that a user gives is refused under an old name (`renamings`), `wanma job --upgrade` rewrites its file,
and what older runs have written is read under the new names (`with_new_names`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wanma.job.file.key_lines import KeyPath

KEYS = {
    "model.capacity": "model.capacity_factor",
    "model.statistics_group": "model.batch_norm_group",
    "data.interaction_log": "data.path",
    "parallel.balance": "parallel.load_balancing",
    "parallel.share_moves": "parallel.batch_share_schedule",
    "parallel.sequence": "parallel.sequence_parallel",
    "parallel.context": "parallel.cp_method",
    "parallel.hierarchical": "parallel.all_reduce",
    "parallel.outer_rate": "parallel.outer_learning_rate",
    "parallel.overlap_mix": "parallel.overlap_mixing_factor",
    "cluster.interface": "cluster.network_interface",
    "cluster.place": "cluster.topology_address",
    "cluster.allocator": "cluster.host_allocator",
    "cluster.start_seconds": "cluster.start_timeout_seconds",
    "cluster.join_seconds": "cluster.last_call_timeout_seconds",
    "cluster.hang_seconds": "cluster.hang_timeout_seconds",
    "cluster.retries": "cluster.max_restarts",
    "cluster.slow_factor": "cluster.straggler_factor",
    "cluster.requeue_code": "cluster.requeue_exit_code",
    "checkpoint.snapshots": "checkpoint.in_memory_every_steps",
}
"""New path of each renamed key, by its old path; dotted, without list positions."""

_NOTHING: dict[str | bool, str] = {"nothing": "none"}
VALUES: dict[str, dict[str | bool, str]] = {
    "parallel.shard": _NOTHING,
    "parallel.all_reduce": {True: "hierarchical", False: "backend"},
    "parallel.offload_parameters": _NOTHING,
    "parallel.offload_optimizer": _NOTHING,
    "parallel.offload_activations": _NOTHING,
    "parallel.collectives": {"shared": "shared_memory"},
    "parallel.compression": _NOTHING,
    "parallel.compression_groups.compression": _NOTHING,
    "parallel.synchronize": {"stale": "delayed"},
    "parallel.outer_compression": _NOTHING,
    "parallel.outer_offload": _NOTHING,
}
"""Renamed values, old to new, by the new path of their key."""


@dataclass(frozen=True)
class Renaming:
    """Old name in a job: a key, or a value of a key."""

    path: KeyPath
    """Path of the key as given."""
    old: str
    """Old path of a key, such as 'parallel.context', or old value as TOML writes it, without quotes."""
    new: str
    is_value: bool = False

    @property
    def new_path(self) -> KeyPath:
        """Path of the key under the new names."""
        return new_path(self.path)

    def __str__(self) -> str:
        if self.is_value:
            old = self.old if self.old in ("true", "false") else f"'{self.old}'"
            return f"{dotted_name(self.path)} = {old} is renamed to '{self.new}'"
        return f"'{self.old}' is renamed to '{self.new}'"


def renamings(tables: Mapping[str, Any]) -> list[Renaming]:
    """Return every old name in the nested tables of a job, in their order."""
    return list(_renamings(tables, ()))


def with_new_names(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested tables of a job with old keys and values under their new names.

    Where a table has a key under both names, the new one holds.
    """
    renamed: dict[str, Any] = _renamed(tables, ())
    return renamed


def new_path(path: KeyPath) -> KeyPath:
    """Return the path of a key under the new names."""
    steps: KeyPath = ()
    for step in path:
        steps = (*steps, _new_name((*steps, step)))
    return steps


def dotted_name(path: KeyPath) -> str:
    """Return the dotted path without list positions, such as 'data.sources.weight'."""
    return ".".join(step for step in path if isinstance(step, str))


def _renamings(value: Any, path: KeyPath) -> Iterator[Renaming]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            item_path = (*path, name)
            if (new := _new_key(item_path)) is not None:
                yield Renaming(item_path, dotted_name(item_path), new)
            yield from _renamings(item, item_path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _renamings(item, (*path, index))
    elif isinstance(value, str | bool) and (new := _new_values(path).get(value)) is not None:
        yield Renaming(path, value if isinstance(value, str) else str(value).lower(), new, is_value=True)


def _renamed(value: Any, path: KeyPath) -> Any:
    if isinstance(value, Mapping):
        names = {name: _new_name((*path, name)) for name in value}
        return {
            new: _renamed(value[name], (*path, new))
            for name, new in names.items()
            if new == name or new not in value
        }
    if isinstance(value, list):
        return [_renamed(item, (*path, index)) for index, item in enumerate(value)]
    return _new_values(path).get(value, value) if isinstance(value, str | bool) else value


def _new_name(path: KeyPath) -> Any:
    """Return the last step of `path` under its new name."""
    new = _new_key(path)
    return path[-1] if new is None else new.rpartition(".")[2]


def _new_key(path: KeyPath) -> str | None:
    """Return the new dotted path of the key at `path`; None if it is not renamed."""
    has_dots = any(isinstance(step, str) and "." in step for step in path)
    return None if has_dots else KEYS.get(dotted_name(path))


def _new_values(path: KeyPath) -> Mapping[str | bool, str]:
    return VALUES.get(dotted_name(new_path(path)), {})
