"""Shards of parameters with their optimizer state, and the tensors of frames."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from wanma.job.errors import WanmaError
from wanma.job.run.parameter_servers import ServedParameter
from wanma.models.recommender.row_updates import ROW_RULES, RowUpdate
from wanma.parallel.embedding.fused_updates import update_rows
from wanma.parameter_server.table import ServerTable

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
}
"""Dtypes that frames may have, by name."""
_STEP_KEY = "step"
IDS_KEY = "ids"
"""Key of the rows that a message has, beside the keys of their tensors."""
_PIECE_BYTES = 16 << 20
"""Bytes of the weights of one message: memory, and time in which its shard answers no pull."""
_MAX_CHANGED_ROWS = 1 << 14
"""Changed rows of one message: each may lie on a page of its own in the file of worker 0."""
_SCANNED_ROWS = 1 << 24
"""Rows among which one message looks for changed ones."""


@dataclass(frozen=True)
class Gradient:
    """Gradient of a shard's rows of one parameter."""

    values: Tensor
    """Gradient of all rows, or of those with the ids, (rows, width) fp32."""
    ids: Tensor | None = None
    """Rows within the shard, each once, (rows,) int64; None: all, in their order."""

    def dense(self, like: Tensor) -> Tensor:
        """Return the gradient of all rows of `like`."""
        if self.ids is None:
            return self.values
        return torch.zeros_like(like).index_add_(0, self.ids, self.values)


def sum_gradients(gradients: Sequence[Gradient]) -> Gradient:
    """Return the sum of the workers' gradients, in the order of the workers."""
    if len(gradients) == 1:
        return gradients[0]
    if gradients[0].ids is None:
        total = gradients[0].values.clone()
        for gradient in gradients[1:]:
            total += gradient.values
        return Gradient(total)
    all_ids = torch.cat([gradient.ids for gradient in gradients if gradient.ids is not None])
    ids, places = all_ids.unique(return_inverse=True)
    values = torch.cat([gradient.values for gradient in gradients])
    return Gradient(values.new_zeros(len(ids), values.shape[1]).index_add_(0, places, values), ids)


class Shard:
    """Row range of each parameter, and the optimizer over them.

    Args:
        table: table of the servers.
        index: number of the shard.
        optimizer: `kind` of the optimizer, and its settings.
    """

    def __init__(self, table: ServerTable, index: int, optimizer: Mapping[str, Any]) -> None:
        self.index = index
        self.lock = threading.Lock()
        self.version = 0
        """Number of updates that it has seen."""
        self.weights: dict[str, nn.Parameter] = {}
        self._settings = dict(optimizer)
        self._row_rule = ROW_RULES.get(optimizer["tables"])
        """Rule of tables that updates used rows alone; None: tables follow the optimizer of all others."""
        self._tables: dict[str, ServedParameter] = {}
        """Tables that follow the row rule."""
        self._table_states: dict[str, dict[str, Tensor]] = {}
        self._row_updates: dict[str, Tensor] = {}
        """By such table the number of the update that changed each row last, (rows,) int32."""
        groups = []
        for parameter in table.parameters:
            if rows := table.row_range(parameter, index):
                weight = nn.Parameter(torch.zeros(len(rows), parameter.width))
                self.weights[parameter.name] = weight
                if parameter.is_table and self._row_rule is not None:
                    self._tables[parameter.name] = parameter
                    states = self._row_rule.new_states(weight.detach())
                    self._table_states[parameter.name] = {**states, _STEP_KEY: torch.tensor(0.0)}
                    self._row_updates[parameter.name] = torch.zeros(len(rows), dtype=torch.int32)
                    continue
                groups.append(
                    {
                        "params": [weight],
                        "learning_rate_scale": parameter.learning_rate_scale,
                        "weight_decay": parameter.weight_decay,
                        "name": parameter.name,
                    }
                )
        self._optimizer = _build_optimizer(groups, optimizer) if groups else None

    def rows(self, name: str, ids: Tensor | None) -> Tensor:
        """Return a copy of rows of a parameter; `ids` None: of all."""
        weight = self.weights[name].detach()
        return weight.clone() if ids is None else weight.index_select(0, ids)

    def apply(self, update: int, gradients: Mapping[str, Gradient], factor: float, rate: float) -> None:
        """Apply update number `update`: gradients times `factor`. An update that it has seen changes nothing.

        Args:
            update: number of the update, from 1.
            gradients: summed gradients of the parameters that have one; none: the step is skipped.
            factor: factor from the sums to the clipped gradient of the mean loss.
            rate: learning rate.

        Raises:
            WanmaError: an update before it is missing.
        """
        if update <= self.version:
            return
        if update > self.version + 1:
            raise WanmaError(f"shard {self.index} has update {self.version}, and was given {update}")
        if gradients:
            for name in self._tables.keys() & gradients.keys():
                self._update_rows(update, self._tables[name], gradients[name], factor, rate)
        if gradients and self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["learning_rate_scale"]
                gradient, (weight,) = gradients.get(group["name"]), group["params"]
                if gradient is None:  # torch's rules leave it and its state as they are
                    continue
                if gradient.ids is not None and self._leaves_other_rows(group):
                    with torch.no_grad():
                        weight.index_add_(0, gradient.ids, gradient.values, alpha=-group["lr"] * factor)
                else:
                    weight.grad = gradient.dense(weight) * factor
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.version = update

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's rows as `weight`, and the optimizer's state of them."""
        weight = self.weights[name]
        state = self._state(name)
        values = {key: torch.as_tensor(value) for key, value in state.items() if value is not None}
        return {"weight": weight.detach(), **values}

    def read(self, name: str, rows: range, since: int | None) -> tuple[dict[str, Tensor], int]:
        """Return a copy of the first piece of a row range, and the row behind it.

        Args:
            name: parameter.
            rows: rows within the shard.
            since: number of an update: of a table of which updates change single rows, only those changed
                after it, as `ids`, (rows,) int64, and the tensors of these; None: all.
        """
        tensors, piece_rows = self.tensors(name), _piece_rows(self.weights[name].shape[1])
        if since is None or name not in self._row_updates:
            stop = min(rows.start + piece_rows, rows.stop)
            return {key: one.clone() for key, one in slice_rows(tensors, rows.start, stop).items()}, stop
        stop = min(rows.start + _SCANNED_ROWS, rows.stop)
        ids = (self._row_updates[name][rows.start : stop] > since).nonzero()[:, 0] + rows.start
        if len(ids) > (limit := min(piece_rows, _MAX_CHANGED_ROWS)):
            ids, stop = ids[:limit], int(ids[limit])
        changed = {key: one.index_select(0, ids) if one.ndim else one.clone() for key, one in tensors.items()}
        return {**changed, IDS_KEY: ids}, stop

    def fill(self, name: str, start: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill rows from `start` on with what `tensors` returned for them.

        Raises:
            WanmaError: a weight is not finite.
        """
        weight, state = self.weights[name], self._state(name)
        if not bool(torch.isfinite(tensors["weight"]).all()):
            raise WanmaError(
                f"the parameter servers refuse {name}: some of its values are not finite",
                "continue from a checkpoint with finite weights",
            )
        stop = start + len(tensors["weight"])
        weight.detach()[start:stop] = tensors["weight"]
        if name in self._row_updates:  # since when is not known: as if the newest update had changed them
            self._row_updates[name][start:stop] = self.version
        for key, tensor in tensors.items():
            if key == _STEP_KEY:
                state[key] = tensor.clone()
            elif key != "weight":
                if key not in state:
                    state[key] = torch.zeros_like(weight)
                state[key][start:stop] = tensor

    def _state(self, name: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter's rows; it may be changed."""
        if name in self._tables:
            return self._table_states[name]
        assert self._optimizer is not None
        state: dict[str, Any] = self._optimizer.state[self.weights[name]]
        return state

    @torch.no_grad()
    def _update_rows(
        self, number: int, table: ServedParameter, gradient: Gradient, factor: float, rate: float
    ) -> None:
        """Update the rows of a table whose gradient is not zero: others do not count as used."""
        assert self._row_rule is not None
        assert gradient.ids is not None
        states = self._table_states[table.name]
        states[_STEP_KEY] += 1
        ids, values = gradient.ids, gradient.values
        is_used = values.abs().sum(1).ne(0)  # faster than `any`
        if not bool(is_used.all()):
            ids, values = ids[is_used], values[is_used]
        update = RowUpdate(
            ids,
            values * factor,
            rate * table.learning_rate_scale,
            table.weight_decay,
            int(states[_STEP_KEY]),
            (self._settings["betas"][0], self._settings["betas"][1]),
            self._settings["epsilon"],
        )
        update_rows(self._settings["tables"], self.weights[table.name].detach(), states, update)
        self._row_updates[table.name][ids] = number

    def _leaves_other_rows(self, group: Mapping[str, Any]) -> bool:
        """Return whether the optimizer's rule leaves rows without a gradient as they are."""
        return self._settings["kind"] == "sgd" and not group["momentum"] and not group["weight_decay"]


def _build_optimizer(groups: list[dict[str, Any]], settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that one process would have: its rules compute element by element."""
    if settings["kind"] == "sgd":
        return SGD(groups, lr=0.0, momentum=settings["momentum"])
    if settings["kind"] == "adamw":
        betas = (settings["betas"][0], settings["betas"][1])
        return AdamW(groups, lr=0.0, betas=betas, eps=settings["epsilon"], fused=True)
    raise WanmaError(
        f"parameter servers have no optimizer '{settings['kind']}'", "set train.optimizer = 'adamw'"
    )


def pack_tensors(tensors: Iterable[tuple[dict[str, Any], Tensor]]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return (descriptions, buffers) of tensors, each of which has some keys of its own."""
    descriptions, buffers = [], []
    for keys, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        dtype = str(tensor.dtype).removeprefix("torch.")
        descriptions.append({**keys, "dtype": dtype, "shape": list(tensor.shape)})
        buffers.append(flat.view(torch.uint8).numpy() if flat.numel() else b"")
    return descriptions, buffers


def unpack_tensors(
    descriptions: Sequence[dict[str, Any]], buffers: Sequence[bytearray]
) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the tensors that `pack_tensors` described; they share the memory of the buffers."""
    tensors = []
    for keys, buffer in zip(descriptions, buffers, strict=True):
        dtype = _DTYPES[keys["dtype"]]
        flat = torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)
        tensors.append((keys, flat.reshape(keys["shape"])))
    return tensors


def overlapping_rows(
    old: ServerTable, new: ServerTable, parameter: ServedParameter, shard: int
) -> list[tuple[int, range]]:
    """Return the shards of `old`, with their rows, of which a shard of `new` is made."""
    rows = new.row_range(parameter, shard)
    parts = []
    for other in range(len(old.holders)):
        theirs = old.row_range(parameter, other)
        both = range(max(rows.start, theirs.start), min(rows.stop, theirs.stop))
        if both:
            parts.append((other, both))
    return parts


def row_pieces(rows: range, parameter: ServedParameter) -> Iterator[range]:
    """Yield parts of a row range that one message carries, as neither side keeps room for all rows."""
    size = _piece_rows(parameter.width)
    for start in range(rows.start, rows.stop, size):
        yield range(start, min(start + size, rows.stop))


def _piece_rows(width: int) -> int:
    return max(_PIECE_BYTES // (4 * max(width, 1)), 1)


def slice_rows(tensors: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Return rows of a parameter's tensors; numbers that all rows share are left whole."""
    return {key: tensor[start:stop] if tensor.ndim else tensor for key, tensor in tensors.items()}
