"""Diagnosis as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wanma.diagnosis.evidence import Evidence, read_evidence
from wanma.diagnosis.finding import Finding
from wanma.diagnosis.findings import MIN_STEPS, diagnose
from wanma.observe.units import duration_text, percent_text
from wanma.report.key_figures import state_sentence
from wanma.report.run_report import Report
from wanma.report.step_parts import FORWARD_BACKWARD, PART_NAMES

MIN_SHOWN_SHARE = 0.01
"""Share of a step from which a part is shown."""


def diagnosis_text(report: Report) -> str:
    """Return the diagnosis of a run."""
    evidence = read_evidence(report)
    return findings_text(evidence, diagnose(evidence))


def findings_text(evidence: Evidence, findings: Sequence[Finding]) -> str:
    """Return the findings, each with its evidence and its change, and the parts of a step."""
    return "\n".join(_lines(evidence, findings))


def _lines(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[str]:
    yield f"{evidence.report.run.name}: {state_sentence(evidence.report)}"
    for number, finding in enumerate(findings, 1):
        bound = f"  (at most {percent_text(finding.lost_share)} of the step to gain)"
        if finding.gain is not None:
            bound = f"  (forecast: {percent_text(finding.gain)} faster)"
        yield ""
        yield f"{number}. {finding.title}{bound if finding.lost_share else ''}"
        yield from (f"   · {text}" for text in finding.evidence)
        if finding.forecast:
            yield f"   {'→' if finding.gain is not None else '·'} {finding.forecast}"
        yield f"   → {finding.change}"
    if evidence.step_seconds is None:
        if not findings:
            yield "nothing to judge yet: no step after the warm-up"
        return
    parts = {name: seconds / evidence.step_seconds for name, seconds in evidence.parts.items()}
    shown = sorted((item for item in parts.items() if item[1] >= MIN_SHOWN_SHARE), key=lambda item: -item[1])
    text = ", ".join(f"{PART_NAMES.get(name, name)} {percent_text(share)}" for name, share in shown)
    yield ""
    if not findings:
        if evidence.steps < MIN_STEPS:
            yield f"fewer than {MIN_STEPS} steps: too early to judge"
        elif FORWARD_BACKWARD in evidence.parts:
            yield (
                "nothing stands out outside forward and backward, of which the run has no parts: "
                "`wanma profile` shows them"
            )
        else:
            yield "nothing stands out: no part but computation takes a share that is worth a change"
    yield f"a step of {duration_text(evidence.step_seconds)}: {text}"
