"""The smallest case that is still wrong."""

from __future__ import annotations

from collections.abc import Callable

from support.generated.case import Case
from support.generated.generate import smaller


def shrink(case: Case, is_wrong: Callable[[Case], bool], tries: int = 60) -> Case:
    """Drop one thing after the other while the case stays wrong."""
    tried: set[Case] = {case}
    found = True
    while found:
        found = False
        for candidate in smaller(case):
            if candidate in tried or len(tried) > tries:
                continue
            tried.add(candidate)
            if is_wrong(candidate):
                case, found = candidate, True
                break
    return case
