"""A verdict on a case: equal to the plain loop, refused with a reason, or wrong."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from support.generated.case import Case, patched, program
from support.generated.features import FEATURES
from support.generated.ranks import Outcome, Ranks
from support.generated.reference import Trained, plain_loop

TOLERANCES = {"fp64": 2e-9, "fp32": 3e-6}


_PARTS = {name for name, feature in FEATURES.items() if feature.parts}
"""Features whose samples decide which modules are called: a layout may not be able to do a later batch."""


@dataclass(frozen=True)
class Verdict:
    """A case's end: 'equal', 'refused' or 'wrong'; 'void' where there is nothing to compare with, or 'late'
    where a later batch than the first is refused, by its content."""

    kind: str
    text: str = ""
    difference: float = 0.0


class Judge:
    """Runs cases in processes that stay."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}
        self._alone: dict[Case, Outcome] = {}

    def __call__(self, case: Case) -> Verdict:
        expected = _expected(case)
        outcome = self.run(case)
        if isinstance(expected, str):
            if outcome.kind in ("refused", "error"):
                return Verdict("void", expected)
            return Verdict("wrong", f"{outcome.kind}, where the plain loop fails: {expected}")
        if outcome.kind == "refused":
            broke = "the loss is nan" in outcome.text and all(map(math.isfinite, expected.losses))
            return Verdict("wrong" if broke else "refused", outcome.text)
        if outcome.kind == "late" and any(name in _PARTS for name in case.features):
            return Verdict("late", outcome.text)
        if outcome.kind != "trained":
            return Verdict("wrong", f"{outcome.kind}: {outcome.text}")
        assert outcome.trained is not None
        if case.draws:
            return self._drawn(case, outcome.trained)
        return _compared(case, expected, outcome.trained)

    def _drawn(self, case: Case, trained: Trained) -> Verdict:
        """No plain loop draws what wanma keys: compare with one rank that has the whole batch."""
        if case.is_whole:
            return Verdict("void", "it is what other layouts are compared with")
        layout = "whole batch" if case.statistics_group is None else "micro-batches"
        # `wanma.train` refuses some of what a loop of one's own may do: it sends objects, it has a loss.
        for entry in dict.fromkeys(("train", case.entry)):
            alone = replace(case, layout=layout, collectives="gloo", entry=entry)
            if alone not in self._alone:
                self._alone[alone] = self.run(alone)
            if (expected := self._alone[alone]).trained is not None:
                return _compared(case, expected.trained, trained)
        return Verdict("wrong", f"trained, where one rank alone is {expected.kind}: {expected.text}")

    def run(self, case: Case) -> Outcome:
        if case.ranks not in self._ranks:
            self._ranks[case.ranks] = Ranks(case.ranks)
        return self._ranks[case.ranks].run(case)

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


@contextlib.contextmanager
def judging() -> Iterator[Judge]:
    judge = Judge()
    try:
        yield judge
    finally:
        judge.close()


_known: dict[Case, Trained | str] = {}


def _expected(case: Case) -> Trained | str:
    """The plain loop's result, or why it has none; it knows no layout, but the groups of statistics."""
    layout = "whole batch" if case.is_whole or case.statistics_group is None else "micro-batches"
    plain = replace(case, layout=layout, entry="train", collectives="gloo")
    if plain not in _known:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with warnings.catch_warnings(), patched(plain):
                warnings.simplefilter("ignore")
                _known[plain] = plain_loop(plain, program(plain))
        except Exception as error:
            _known[plain] = f"{type(error).__name__}: {error}"
        finally:
            torch.set_num_threads(threads)
    return _known[plain]


def _compared(case: Case, expected: Trained, got: Trained) -> Verdict:
    missing = expected.tensors.keys() - got.tensors.keys()
    extra = {name for name in got.tensors.keys() - expected.tensors.keys() if "version" not in name}
    if missing or extra:
        return Verdict("wrong", f"names: missing {sorted(missing)}, not of the model {sorted(extra)}")
    tolerance = TOLERANCES[case.precision]
    worst, which = 0.0, ""
    for name, tensor in expected.tensors.items():
        other = got.tensors[name]
        if other.shape != tensor.shape:
            return Verdict("wrong", f"{name} has shape {tuple(other.shape)}, not {tuple(tensor.shape)}")
        if tensor.numel() == 0:
            continue
        kind = torch.complex128 if tensor.is_complex() else torch.float64
        difference = float((tensor.to(kind) - other.to(kind)).abs().max())
        if tensor.dtype in (torch.complex64, torch.float32):
            difference *= tolerance / TOLERANCES["fp32"]
        if not difference <= worst:
            worst, which = difference, name
    if not worst <= tolerance:
        return Verdict("wrong", f"{which} is off by {worst:.2g}", worst)
    pairs = list(zip(expected.losses, got.losses, strict=False))
    if len(expected.losses) != len(got.losses):
        return Verdict("wrong", f"{len(got.losses)} steps, not {len(expected.losses)}")
    if expected.validation is not None and got.validation is not None:
        pairs.append((expected.validation, got.validation))
    elif expected.validation is not None:
        return Verdict("wrong", "no validation")
    if any(tensor.dtype in (torch.complex64, torch.float32) for tensor in expected.tensors.values()):
        tolerance = TOLERANCES["fp32"]
    loss = max(abs(one - other) / max(abs(one), 1.0) for one, other in pairs)
    if not loss <= tolerance:
        return Verdict("wrong", f"the loss is off by {loss:.2g}: {got.losses} not {expected.losses}", loss)
    return Verdict("equal", difference=worst)
