"""Merging of a unit's calls into `Operator`s, and modelling of a compiler's fusion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from wanma.job.forecast.operators import ExecutionMode, Operator
from wanma.models.workload.operator_trace import OperatorCall, StorageAccess

_FUSIBLE_KINDS = frozenset({"elementwise", "normalisation", "reduction"})
"""Kinds of operators that compilers fuse with their neighbours into one kernel."""


def group_operators(
    calls: Sequence[OperatorCall], saved_storages: Collection[int]
) -> dict[str, tuple[Operator, ...]]:
    """Return the operators of each unit.

    Args:
        calls: traced calls in order.
        saved_storages: storages that outlive the pass that wrote them, such as tensors saved for backward.
    """
    operators_by_unit: defaultdict[str, list[Operator]] = defaultdict(list)
    for call in calls:
        operators_by_unit[call.module_path].append(
            _operator(call, "eager" if call.kind in _FUSIBLE_KINDS else "always")
        )
    for unit, operator in _fuse_operators(calls, saved_storages):
        operators_by_unit[unit].append(operator)
    return {unit: tuple(_merge_equal(operators)) for unit, operators in operators_by_unit.items()}


def _operator(call: OperatorCall, execution_mode: ExecutionMode) -> Operator:
    per_sample, fixed = call.count_elements()
    return Operator(
        call.kind,
        call.phase,
        call.kernel_count,
        per_sample,
        fixed,
        call.matmul,
        call.attention,
        call.embedding_row_elements,
        call.is_saved_by_selective_recompute,
        execution_mode,
    )


def _merge_equal(operators: list[Operator]) -> Iterator[Operator]:
    """Merge equal operators into one, in the order of their first."""
    first: dict[Operator, Operator] = {}
    for operator in operators:
        key = replace(operator, kernel_count=0, elements_per_sample=0.0, fixed_elements=0.0)
        merged = first.get(key, key)
        first[key] = replace(
            merged,
            kernel_count=merged.kernel_count + operator.kernel_count,
            elements_per_sample=merged.elements_per_sample + operator.elements_per_sample,
            fixed_elements=merged.fixed_elements + operator.fixed_elements,
        )
    yield from first.values()


@dataclass
class _FusedRegion:
    """Fused region: neighbours that become one kernel, plus one for each extra pass over an input."""

    kernel_count: int = 1
    reads: dict[int, StorageAccess] = field(default_factory=dict)
    repeated_reads: list[StorageAccess] = field(default_factory=list)
    writes: dict[int, StorageAccess] = field(default_factory=dict)

    def add(self, call: OperatorCall) -> None:
        for piece in call.reads:
            if piece.storage is not None and piece.storage not in self.writes:
                self.reads.setdefault(piece.storage, piece)
        for piece in call.writes:
            if piece.storage is not None:
                self.writes[piece.storage] = piece
        self.kernel_count += call.input_passes - 1
        self.repeated_reads += [piece for piece in call.reads for _ in range(call.input_passes - 1)]


def _fuse_operators(
    calls: Sequence[OperatorCall], saved_storages: Collection[int]
) -> Iterator[tuple[str, Operator]]:
    """Yield fused operators: tensors that only neighbours in a region need are never written."""
    last = {
        piece.storage: number for number, call in enumerate(calls) for piece in (*call.reads, *call.writes)
    }
    numbered_calls = enumerate(calls)
    for (unit, phase, is_fused), group in groupby(
        numbered_calls, key=lambda pair: (pair[1].module_path, pair[1].phase, pair[1].kind in _FUSIBLE_KINDS)
    ):
        if not is_fused:
            continue
        region, end = _FusedRegion(), 0
        for number, call in group:
            region.add(call)
            end = number
        outputs = [
            piece
            for storage, piece in region.writes.items()
            if last[storage] > end or storage in saved_storages
        ]
        transfers = [*region.reads.values(), *region.repeated_reads, *outputs]
        yield (
            unit,
            Operator(
                "elementwise",
                phase,
                region.kernel_count,
                sum(piece.elements_per_sample for piece in transfers),
                sum(piece.fixed_elements for piece in transfers),
                execution_mode="compiled",
            ),
        )
