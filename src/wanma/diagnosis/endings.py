"""Findings about the end of a run: a crash, a failure or a hang, and numbers that are not finite."""

from __future__ import annotations

import math

from wanma.diagnosis.evidence import Evidence
from wanma.diagnosis.finding import Finding, Urgency
from wanma.elastic.failure import REDUCE_MEMORY_HINT
from wanma.observe.console.record_follower import read_records
from wanma.observe.units import bytes_text, count_text, duration_text

MAX_NORM_GROWTH = 10.0
"""Ratio of a gradient norm to the least of the steps before that steps of a sound training may have."""
LITTLE_FREE_MEMORY = 0.05
"""Share of a node's memory that is free below which the kernel may kill processes."""


def find_crash(evidence: Evidence) -> Finding | None:
    report = evidence.report
    if report.state != "crashed":
        return None
    host = report.starts[-1].get("host", "its node") if report.starts else "its node"
    texts = [f"no process of it lives on {host}, and no end is recorded"]
    title = "the run ended without a word: its processes were killed, or the node is gone"
    change = "look for the kernel's out-of-memory kills with `dmesg`"
    for node, records in evidence.nodes.items():
        known = [
            record
            for record in records[-2:]
            if record.get("memory_bytes") and "memory_available_bytes" in record
        ]
        for record in known[-1:]:
            free, total = record["memory_available_bytes"], record["memory_bytes"]
            fall = max(known[0]["memory_available_bytes"] - free, 0)
            text = f"node {node} had {bytes_text(free)} of {bytes_text(total)} of memory free when last read"
            if fall:
                seconds = record["time"] - known[0]["time"]
                text += f", {bytes_text(fall)} less than {duration_text(seconds)} before"
            texts.append(text)
            if free - fall < LITTLE_FREE_MEMORY * total:
                title = f"the memory of node {node} was running out: the kernel has probably killed the run"
                change = REDUCE_MEMORY_HINT
            elif change != REDUCE_MEMORY_HINT:
                change = "its memory was not full: look for `kill -9`, limits of the batch system, a reboot"
        gpus = [gpu for record in records[-1:] for gpu in record.get("gpus") or () if gpu.get("xid")]
        texts += [f"GPU {gpu['gpu']} of node {node} had reported XID {gpu['xid']}" for gpu in gpus]
    return Finding("crash", "end", title, tuple(texts), f"{change}; the same command resumes the run")


def find_failure(evidence: Evidence) -> Finding | None:
    report = evidence.report
    if report.state != "failed" or evidence.has_non_finite_end:
        return None
    first, *others = report.failure.splitlines() or [""]
    title = "a hang" if evidence.hang else "a failure"
    lines = [line.strip() for line in (evidence.hang.splitlines()[1:] if evidence.hang else others)]
    return Finding(
        "hang" if evidence.hang else "failure",
        "end",
        f"{title} ended the run: {first}",
        tuple(line for line in lines if line)[:8],
        "mend the cause; the same command resumes from the newest checkpoint",
    )


def find_non_finite(evidence: Evidence) -> Finding | None:
    if not evidence.non_finite:
        return None
    columns, events = evidence.report.steps, evidence.non_finite
    norms = dict(zip(columns["step"], columns.get("grad_norm", ()), strict=False))
    if evidence.has_non_finite_end:  # the steps since the last sound one
        last_sound = max((step for step, norm in norms.items() if math.isfinite(norm)), default=0)
        events = [event for event in events if event["step"] > last_sound]
    first, prefix = events[0]["step"], "layer_grad_norms."
    entries = (entry for entry in read_records(evidence.report.run, math.inf) if entry["kind"] == "step")
    record = next((entry for entry in entries if entry["step"] == first), {})
    marked = record.get("non_finite") or {}
    layers = [name.removeprefix(prefix) for name in marked if name.startswith(prefix)]
    is_in_layers = 0 < len(layers) < len(record.get("layer_grad_norms") or {})
    before = [norm for step, norm in norms.items() if step < first][-20:]
    finite = [norm for norm in before if math.isfinite(norm)]
    growth = finite[-1] / min(finite) if finite and min(finite) > 0 else 1.0
    texts = [evidence.report.failure.partition("\n")[0]] if evidence.has_non_finite_end else []
    texts.append(f"{count_text(len(events), 'step')} with NaN or infinity, the first is {first:,}")
    if is_in_layers:
        texts.append(f"the gradients of {', '.join(layers[-5:])} are not finite, those of other layers are")
    if any(event["samples"] for event in events):
        texts.append("samples of the step have NaN or infinity themselves")
        change = (
            "mend the samples of the step, which its event names, or leave them out of the data; "
            "train.non_finite = 'skip' leaves such steps out"
        )
    elif growth > MAX_NORM_GROWTH:
        texts.append(f"the gradient norm had grown {growth:,.0f} times in the steps before")
        change = "lower train.learning_rate, or lengthen train.warmup_steps"
    else:
        texts.append("the gradient norm had not grown before, and no sample was found that is not finite")
        where = "the backward of the last of these layers" if is_in_layers else "the model's operations"
        change = f"look at {where}: a division, root or logarithm of zero, a mask without an entry"
    urgency: Urgency = "end" if evidence.has_non_finite_end else "wrong"
    return Finding("not_finite", urgency, "the loss or gradient is not finite", tuple(texts), change)
