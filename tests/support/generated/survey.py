"""A survey: the verdicts on many cases, their counts, and the table that the documents have of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.generated.case import Case, source
from support.generated.features import FEATURES
from support.generated.judge import Judge, Verdict
from support.generated.shrink import shrink

COLUMNS = {
    "one rank": ("whole batch",),
    "micro-batches": ("micro-batches", "recomputing"),
    "replicas": ("replicas", "replicas, at once"),
    "ZeRO 1, 2": ("ZeRO 1", "ZeRO 2", "replicas of ZeRO 2"),
    "ZeRO 3": ("ZeRO 3", "ZeRO 3, recomputing", "ZeRO 3, at once"),
    "pipeline": ("pipeline", "gpipe, recomputing", "replicas of pipelines"),
}
"""Of the table: the layouts that a column is made of."""


@dataclass
class Survey:
    """Verdicts, as they come."""

    verdicts: list[tuple[Case, Verdict]] = field(default_factory=list)

    def add(self, case: Case, verdict: Verdict) -> None:
        self.verdicts.append((case, verdict))

    def of(self, kind: str) -> list[tuple[Case, Verdict]]:
        return [(case, verdict) for case, verdict in self.verdicts if verdict.kind == kind]

    @property
    def counts(self) -> dict[str, int]:
        """Number of cases by verdict."""
        return dict(Counter(verdict.kind for _, verdict in self.verdicts))

    def counts_table(self) -> str:
        """Counts by layout, entry and collectives, as Markdown."""
        rows: dict[tuple[str, str, str], Counter[str]] = {}
        for case, verdict in self.verdicts:
            key = case.layout, case.entry, case.collectives if case.ranks > 1 else ""
            rows.setdefault(key, Counter())[verdict.kind] += 1
        kinds = ("equal", "refused", "void", "wrong")
        lines = [f"| layout | by | over | {' | '.join(kinds)} |", "| --- " * (3 + len(kinds)) + "|"]
        for key, counts in rows.items():
            lines.append(f"| {' | '.join(key)} | {' | '.join(str(counts[kind]) for kind in kinds)} |")
        return "\n".join(lines)

    def features_table(self) -> str:
        """Each feature by itself under each group of layouts, as Markdown, with the reasons of refusals."""
        cells: dict[str, dict[str, set[str]]] = {}
        reasons: dict[str, int] = {}
        for case, verdict in self.verdicts:
            if verdict.kind == "void" or len(case.features) != 1 or case.features[0] not in FEATURES:
                continue
            if case.features == ("linear",) and (case.loss, case.output) != ("squares", "tensor"):
                continue
            column = next(name for name, layouts in COLUMNS.items() if case.layout in layouts)
            cell = cells.setdefault(case.features[0], {}).setdefault(column, set())
            if verdict.kind == "refused":
                number = reasons.setdefault(_reason(verdict.text), len(reasons) + 1)
                cell.add(f"({number})")
            else:
                cell.add({"equal": "✓", "wrong": "✗"}[verdict.kind])
        lines = [f"| feature | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|"]
        for name in FEATURES:
            if name in cells:
                row = (" ".join(sorted(cells[name].get(column, ()))) for column in COLUMNS)
                lines.append(f"| {name.replace('_', ' ')} | {' | '.join(row)} |")
        lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
        return "\n".join(lines)


def survey(cases: Iterable[Case], judge: Judge) -> Survey:
    """The verdicts on `cases`."""
    found = Survey()
    for case in cases:
        found.add(case, judge(case))
    return found


def account(case: Case, verdict: Verdict, judge: Judge) -> str:
    """A wrong case in words: itself, the smallest that is still wrong, and that one's program."""
    smallest = shrink(case, lambda other: judge(other).kind == "wrong")
    return (
        f"wrong: {case}\n    {verdict.text[-1500:]}\n"
        f"smallest: {smallest}\n    {judge(smallest).text[-1500:]}\n"
        f'to see it again: PYTHONPATH=src:tests python -m support.generated --no-shrink --case "{smallest}"\n'
        f"{source(smallest)}"
    )


def _reason(text: str) -> str:
    """A refusal's first line, without what is of one case."""
    first = text.split("\n", 1)[0]
    first = re.sub(r"\bblocks?\.?0\.", "blocks.0.", first)
    return re.sub(r"\b\d+\b", "N", first)
