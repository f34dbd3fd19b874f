"""A survey: the verdicts on many cases, their counts, and the table that the documents have of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.generated.case import OUTPUTS, Case, source
from support.generated.features import FEATURES
from support.generated.judge import Judge, Verdict
from support.generated.losses import LOSSES
from support.generated.optimizers import BUILT_IN, OPTIMIZERS
from support.generated.shrink import shrink

COLUMNS = {
    "one rank": ("whole batch",),
    "micro-batches": ("micro-batches", "recomputing"),
    "replicas": ("replicas", "replicas, at once", "replicas, one by one"),
    "ZeRO 1, 2": ("ZeRO 1", "ZeRO 2", "replicas of ZeRO 2"),
    "ZeRO 3": ("ZeRO 3", "ZeRO 3, recomputing", "ZeRO 3, at once"),
    "pipeline": ("pipeline", "gpipe, recomputing", "pipeline, one by one", "replicas of pipelines"),
}
"""Layouts that make one column of the table."""
ROWS: dict[str, tuple[str, ...]] = {
    "feature": tuple(FEATURES),
    "loss": tuple(LOSSES),
    "output": tuple(name for name in OUTPUTS if name != "tensor"),
    "optimizer": tuple(name for name in OPTIMIZERS if name != BUILT_IN),
}
"""Titles and rows of the tables."""
_OF_ONE_CASE = {
    r"\b(blocks?\.?0|block0|first|head|heads)\.[a-z_.0-9]+|\btie\b": "WEIGHT",
    r"\b(Model|Sequential)\b": "MODEL",
    r"\(aten\.[^;]*; .*\)\):": "(its operator and line):",
    r"state\[parameter\]\['\w+'\]": "STATE",
    r"\d+ data ranks|one rank in \d+ micro-batches": "this layout",
    r"rank \d+ [a-z ]*gather.* while rank \d+ [a-z ]*gather[^,]*": "ranks gather unlike parts",
    r"a (tuple|list) of \d+": "a tuple",
    r" See:$": "",
    r"\b\d+(\.\d+)?\b": "N",
}
"""Patterns of words, and what the page has in their place."""
KINDS = ("equal", "refused", "late", "void", "wrong")
"""Kinds of verdicts."""


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
        lines = [f"| layout | by | over | {' | '.join(KINDS)} |", "| --- " * (3 + len(KINDS)) + "|"]
        for key, counts in rows.items():
            lines.append(f"| {' | '.join(key)} | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
        total = self.counts
        lines.append(f"| all | | | {' | '.join(str(total.get(kind, 0)) for kind in KINDS)} |")
        return "\n".join(lines)

    def features_table(self) -> str:
        """Features, losses, outputs and optimizers, each alone, by layout, and reasons of refusals."""
        reasons: dict[str, int] = {}
        cells: dict[tuple[str, str], dict[str, set[str]]] = {}
        for case, verdict in self.verdicts:
            for row in rows_of(case) if verdict.kind != "void" else ():
                cell = cells.setdefault(row, {}).setdefault(column_of(case), set())
                cell.add(_mark(verdict, reasons))
        lines = []
        for title, names in ROWS.items():
            lines += [f"| {title} | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|"]
            for name in names:
                found = cells.get((title, name), {})
                marks = (" ".join(sorted(found.get(column, ()), key=_order)) for column in COLUMNS)
                lines.append(f"| {words(name)} | {' | '.join(marks)} |")
            lines.append("")
        lines += [f"{number}. {reason}" for reason, number in reasons.items()]
        return "\n".join(lines)

    def contradictions(self, page: str) -> list[str]:
        """Verdicts on single features that are not those of a page with such tables."""
        cells, reasons = documented(page)
        found = []
        for case, verdict in self.verdicts:
            for title, name in rows_of(case) if verdict.kind != "void" else ():
                marks = cells[title, words(name)][column_of(case)]
                told = {reasons[int(mark[1:-1]) - 1] for mark in marks if mark.startswith("(")}
                if not ("✓" in marks if verdict.kind == "equal" else reason(verdict.text) in told):
                    found.append(f"{case}: {verdict.kind} {verdict.text}, documented: {marks} {told}")
        return found


def documented(page: str) -> tuple[dict[tuple[str, str], dict[str, list[str]]], list[str]]:
    """Marks of a page by table and row, then by column; and its reasons, in their order."""
    cells: dict[tuple[str, str], dict[str, list[str]]] = {}
    header: list[str] = []
    for text in page.splitlines():
        row = [cell.strip() for cell in text.strip("|").split("|")] if text.startswith("|") else []
        if row[1:] == list(COLUMNS):
            header = row
        elif row and header and len(row) == len(header) and not row[0].startswith("---"):
            marks = (cell.split() for cell in row[1:])
            cells[header[0], row[0]] = dict(zip(COLUMNS, marks, strict=True))
    return cells, re.findall(r"^\d+\. (.*)$", page, re.MULTILINE)


def rows_of(case: Case) -> list[tuple[str, str]]:
    """Tables and rows that a case belongs to; none for combinations."""
    if len(case.features) != 1:
        return []
    if case.optimizer != BUILT_IN:
        return [("optimizer", case.optimizer)]
    found = []
    plainest = "default" if case.is_sequential else "squares"
    if case.loss == plainest and case.output == "tensor" and not case.validates:
        found.append(("feature", case.features[0]))
    if case.features == ("linear",) and case.output == "tensor" and case.validates != case.is_sequential:
        found.append(("loss", case.loss))
    if case.features == ("linear",) and case.loss in ("squares", "default") and case.output != "tensor":
        found.append(("output", case.output))
    return found


def column_of(case: Case) -> str:
    return next(name for name, layouts in COLUMNS.items() if case.layout in layouts)


def words(name: str) -> str:
    """A name as the tables have it."""
    return name.replace("_", " ")


def reason(text: str) -> str:
    """A refusal's first line, without what is of one case."""
    first = text.split("\n", 1)[0].replace("|", "/")
    for pattern, put in _OF_ONE_CASE.items():
        first = re.sub(pattern, put, first)
    return first


def read(lines: Iterable[str]) -> Survey:
    """A survey from lines of `line`; of several verdicts on a case the last."""
    found: dict[Case, Verdict] = {}
    for text in lines:
        told = json.loads(text)
        case = eval(told["case"], {"Case": Case})
        found.pop(case, None)
        found[case] = Verdict(told["kind"], told["text"], told["difference"])
    return Survey(list(found.items()))


def line(case: Case, verdict: Verdict) -> str:
    """A verdict as JSON."""
    told = {"case": str(case), "kind": verdict.kind, "text": verdict.text, "difference": verdict.difference}
    return json.dumps(told)


def _order(mark: str) -> tuple[bool, str]:
    """Place of a mark in a cell: what is equal first."""
    return mark != "✓", mark


def _mark(verdict: Verdict, reasons: dict[str, int]) -> str:
    if verdict.kind in ("equal", "wrong"):
        return "✓" if verdict.kind == "equal" else "✗"
    number = reasons.setdefault(reason(verdict.text), len(reasons) + 1)
    return f"({number})" if verdict.kind == "refused" else f"later ({number})"


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
