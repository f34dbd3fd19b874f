"""Values of a loop's operators on other micro-batches beside the first one, computed as the loop runs.

A user's loop gives losses, and no function from a batch to them that could be called again. So each operator
that it runs outside of the model on the batch, or on values derived from it, is run on three further batches
as well. With the halves A and B of the batch A B, these are B A, A A and B B. If losses add up, f(AB) + f(BA)
= f(AA) + f(BB), also where only targets, or values without a gradient, tie a sample to others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from wanma.torch_internals.dispatch import TorchDispatchMode, operator_schema, tree_leaves, tree_map_only
from wanma.training.checkpointing.training_state import random_state, restore_random_state

EXCHANGED_BATCHES = 3
"""Number of batches beside the loop's own."""
_OPERATORS_BETWEEN_LOOKS = 16
"""Number of operators after which the memory of values that the loop no longer holds is released."""


class ExchangedRows(TorchDispatchMode):
    """Dispatch mode that follows the content of a batch through the operators of a loop.

    Collectives and custom operators are not followed: their results count as the same in all batches. Nor are
    values that leave torch, such as a number of Python's.

    Args:
        rows: rows of the batch.
        tensors: tensors of the batch, each (rows, ...).
        device: device of the batch.
    """

    def __init__(self, rows: int, tensors: Iterable[Tensor], device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        half_rows = rows // 2
        self.rows, self._half_rows = rows, half_rows
        first, second, odd_row = torch.arange(rows, device=device).split(
            [half_rows, half_rows, rows - 2 * half_rows]
        )
        self.halves = tuple(
            torch.cat([first_half, second_half, odd_row])
            for first_half, second_half in ((second, first), (first, first), (second, second))
        )
        self.is_active = True
        """Flag, false in the model, where a sample's output is known to depend on no other sample."""
        self.is_unsupported = rows < 2
        """True if the loop has run an operator that cannot be followed."""
        self._exchanged_storages: dict[int, tuple[StorageWeakRef, list[torch.UntypedStorage]]] = {}
        self._operators = 0
        if not self.is_unsupported:
            self.follow(tensors, self.halves)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions be compiled, which torch would skip under another mode."""
        return True

    def follow(self, tensors: Iterable[Tensor], rows: Sequence[Tensor]) -> None:
        """Begin to follow tensors (rows, ...), whose content in each other batch is that of some rows."""
        for tensor in tensors:
            if _is_plain(tensor) and tensor.ndim > 0 and len(tensor) == self.rows:
                plain = tensor.detach()
                try:
                    self._record(plain, [plain[chosen] for chosen in rows])
                except (RuntimeError, ValueError):  # rows that share their memory
                    self.is_unsupported = True

    def exchanged_values(self, tensor: Any) -> list[Tensor] | None:
        """Return the values of a tensor in the other batches; None where they are its own."""
        storages = self._storages(tensor)
        return None if storages is None else [_view(tensor, storage) for storage in storages]

    def rows_of_arguments(self, arguments: Any) -> Sequence[Tensor] | None:
        """Return the rows of the model's output that belong to the other batches, by its arguments.

        Returns:
            None where they belong to no batch: an argument of a sample is made of several samples.
        """
        pairs = [
            (tensor.detach(), exchanged)
            for tensor in tree_leaves(arguments)
            if isinstance(tensor, Tensor)
            if (exchanged := self.exchanged_values(tensor)) is not None
            if tensor.ndim > 0 and len(tensor) == self.rows
        ]
        if all(self._depends_on_own_sample_only(tensor, exchanged) for tensor, exchanged in pairs):
            return self.halves
        rows = []
        for number in range(EXCHANGED_BATCHES):  # samples in another order, such as sorted by length
            same = torch.stack([_same_rows(exchanged[number], tensor) for tensor, exchanged in pairs]).all(0)
            if not bool(same.any(1).all()):
                return None
            rows.append(same.int().argmax(1))
        return rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.is_active or self.is_unsupported or func.namespace != "aten":
            return func(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not any(self._storages(x) is not None for x in tensors) or not all(map(_is_plain, tensors)):
            return func(*args, **kwargs)
        self._release_expired()
        try:
            with torch.no_grad():
                for tensor in _mutated_tensors(func, args, kwargs):
                    if self._storages(tensor) is None:
                        self._record(tensor, [tensor] * EXCHANGED_BATCHES)
        except Exception:
            self.is_unsupported = True
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = random_state() if draws else None
        result = func(*args, **kwargs)
        after = random_state() if draws else None
        try:
            self._run_others(func, args, kwargs, result, before)
        except Exception:  # it cannot compute these: an index out of range, another number of elements
            self.is_unsupported = True
        if after is not None:
            restore_random_state(after)
        return result

    def _run_others(self, func: Any, args: Any, kwargs: Any, result: Any, random: Any) -> None:
        results: list[list[Any]] = []
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(EXCHANGED_BATCHES):

                def other(tensor: Tensor, number: int = number) -> Tensor:
                    storages = self._storages(tensor)
                    return tensor if storages is None else _view(tensor, storages[number])

                exchanged_args, exchanged_kwargs = tree_map_only(Tensor, other, (args, kwargs))
                if random is not None:
                    restore_random_state(random)
                results.append(tree_leaves(func(*exchanged_args, **exchanged_kwargs)))
            for index, tensor in enumerate(tree_leaves(result)):
                if isinstance(tensor, Tensor) and self._storages(tensor) is None:
                    self._record(tensor, [leaves[index] for leaves in results])

    def _record(self, tensor: Tensor, exchanged: Sequence[Tensor]) -> None:
        """Note the values of a tensor in the other batches, and of all tensors in its memory."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return
        known_storages = self._storages(tensor)
        storages = known_storages if known_storages is not None else [storage.clone() for _ in exchanged]
        for copy, values in zip(storages, exchanged, strict=True):
            if values.shape != tensor.shape:
                raise ValueError("another number of elements")
            _view(tensor, copy).copy_(values)
        self._exchanged_storages[storage.data_ptr()] = StorageWeakRef(storage), storages

    def _storages(self, tensor: Any) -> list[torch.UntypedStorage] | None:
        if not _is_plain(tensor):
            return None
        known = self._exchanged_storages.get(tensor.untyped_storage().data_ptr())
        return None if known is None or known[0].expired() else known[1]

    def _release_expired(self) -> None:
        self._operators += 1
        if self._operators % _OPERATORS_BETWEEN_LOOKS == 0:
            self._exchanged_storages = {
                key: known for key, known in self._exchanged_storages.items() if not known[0].expired()
            }

    def _depends_on_own_sample_only(self, tensor: Tensor, exchanged: list[Tensor]) -> bool:
        """Return whether each row depends on its own sample and its position alone."""
        second_first, first_first, second_second = exchanged
        half_rows = self._half_rows
        return (
            _equal(tensor[:half_rows], first_first[:half_rows])
            and _equal(second_first[:half_rows], second_second[:half_rows])
            and _equal(tensor[half_rows : 2 * half_rows], second_second[half_rows : 2 * half_rows])
            and _equal(second_first[half_rows : 2 * half_rows], first_first[half_rows : 2 * half_rows])
        )


def _is_plain(tensor: Any) -> bool:
    """Return whether `tensor` is a tensor whose memory can be read directly."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a view of another storage that lies in it as `tensor` lies in its own."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _mutated_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments to which an operator writes."""
    schema = operator_schema(func)
    arguments = [*zip(schema.arguments, args, strict=False)]
    arguments += [
        (argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs
    ]
    return [
        tensor
        for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value)
        if isinstance(tensor, Tensor)
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
    return torch.equal(one, other)


def _same_rows(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask (rows, rows): rows of `one` that equal rows of `other`."""
    return torch.stack([(row == other).flatten(1).all(1) if other.ndim > 1 else row == other for row in one])
