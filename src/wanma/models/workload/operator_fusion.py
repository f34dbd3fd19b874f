"""Merging of a unit's calls into `Operator`s, and modelling of a compiler's fusion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from wanma.job.forecast.operators import Operator, When
from wanma.models.workload.operator_trace import Call, Piece

_FUSED = frozenset({"elementwise", "normalisation", "reduction"})
"""Kinds of operators that compilers fuse with their neighbours into one kernel."""


def operators_by_unit(calls: Sequence[Call], kept: Collection[int]) -> dict[str, tuple[Operator, ...]]:
    """Return the operators of each unit.

    Args:
        calls: traced calls in order.
        kept: storages that outlive the pass that wrote them, such as tensors saved for backward.
    """
    found: defaultdict[str, list[Operator]] = defaultdict(list)
    for call in calls:
        found[call.unit].append(_operator(call, "eager" if call.kind in _FUSED else "always"))
    for unit, operator in _compiled(calls, kept):
        found[unit].append(operator)
    return {unit: tuple(_together(operators)) for unit, operators in found.items()}


def _operator(call: Call, when: When) -> Operator:
    per_sample, fixed = call.elements()
    return Operator(
        call.kind,
        call.phase,
        call.kernels,
        per_sample,
        fixed,
        call.product,
        call.attention,
        call.row_elements,
        call.is_kept,
        when,
    )


def _together(operators: list[Operator]) -> Iterator[Operator]:
    """Merge equal operators into one, in the order of their first."""
    first: dict[Operator, Operator] = {}
    for one in operators:
        key = replace(one, kernels=0, elements_per_sample=0.0, elements_fixed=0.0)
        have = first.get(key, key)
        first[key] = replace(
            have,
            kernels=have.kernels + one.kernels,
            elements_per_sample=have.elements_per_sample + one.elements_per_sample,
            elements_fixed=have.elements_fixed + one.elements_fixed,
        )
    yield from first.values()


@dataclass
class _Region:
    """Fused region: neighbours that become one kernel, plus one for each extra pass over an input."""

    kernels: int = 1
    read: dict[int, Piece] = field(default_factory=dict)
    again: list[Piece] = field(default_factory=list)
    written: dict[int, Piece] = field(default_factory=dict)

    def take(self, call: Call) -> None:
        for piece in call.reads:
            if piece.storage is not None and piece.storage not in self.written:
                self.read.setdefault(piece.storage, piece)
        for piece in call.writes:
            if piece.storage is not None:
                self.written[piece.storage] = piece
        self.kernels += call.passes - 1
        self.again += [piece for piece in call.reads for _ in range(call.passes - 1)]


def _compiled(calls: Sequence[Call], kept: Collection[int]) -> Iterator[tuple[str, Operator]]:
    """Yield fused operators: tensors that only neighbours in a region need are never written."""
    last = {
        piece.storage: number for number, call in enumerate(calls) for piece in (*call.reads, *call.writes)
    }
    numbered = enumerate(calls)
    for (unit, phase, is_fused), group in groupby(
        numbered, key=lambda pair: (pair[1].unit, pair[1].phase, pair[1].kind in _FUSED)
    ):
        if not is_fused:
            continue
        region, end = _Region(), 0
        for number, call in group:
            region.take(call)
            end = number
        out = [piece for storage, piece in region.written.items() if last[storage] > end or storage in kept]
        moved = [*region.read.values(), *region.again, *out]
        yield (
            unit,
            Operator(
                "elementwise",
                phase,
                region.kernels,
                sum(piece.per_sample for piece in moved),
                sum(piece.fixed for piece in moved),
                when="compiled",
            ),
        )
