"""Findings: rules from evidence to a cause, with the change to make; data, each with a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from wanma.diagnosis.evidence import Evidence, RankWork
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text

Urgency = Literal["end", "wrong", "slow"]
"""Subject of a finding: the end of the run, wrong numbers, or lost time."""

MIN_SHARE = 0.05
"""Share of the step below which a cause of lost time is not worth a change."""
MIN_STEPS = 20
"""Number of steps after the first ones below which their times say nothing about the run."""
MAX_NORM_GROWTH = 10.0
"""Ratio of a gradient norm to the least of the steps before that steps of a sound training may have."""
LEAK_SHARE = 0.02
"""Share of its memory by which a rank must have grown, while it was watched, to count as leaking."""
SMALL_MICRO_BATCH, MANY_MICRO_BATCHES, SOUND_MFU = 2, 8, 0.25
"""Samples of a micro-batch, and number of micro-batches, beside which a lower MFU asks for larger ones."""
STRAGGLER_RATIO = 1.2
"""Ratio of a rank's work to its peers' median from which it counts as slower."""


@dataclass(frozen=True)
class Finding:
    """Finding: one cause."""

    name: str
    urgency: Urgency
    title: str
    """The cause in one sentence."""
    evidence: tuple[str, ...]
    """Facts from the records."""
    change: str
    """Change to make."""
    lost_share: float = 0.0
    """Share of the step that it costs, 0 to 1."""


Rule = Callable[[Evidence], Finding | None]


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings, the first cause first: of the end, then of wrong numbers, then of lost time."""
    findings = [
        finding
        for rule in RULES
        if (finding := rule(evidence)) is not None
        if finding.urgency != "slow" or evidence.steps >= MIN_STEPS
    ]
    order: Sequence[Urgency] = ("end", "wrong", "slow")
    return sorted(findings, key=lambda finding: (order.index(finding.urgency), -finding.lost_share))


def _failure(evidence: Evidence) -> Finding | None:
    report = evidence.report
    if report.state == "crashed":
        host = report.starts[-1].get("host", "its node") if report.starts else "its node"
        return Finding(
            "crash",
            "end",
            "the run ended without a word: its processes were killed, or the node is gone",
            (f"no process of it lives on {host}, and no end is recorded",),
            "look for the kernel's out-of-memory kills with `dmesg`; the same command resumes the run",
        )
    if report.state != "failed":
        return None
    first, *others = report.failure.splitlines()
    title = "a hang" if evidence.hang_report else "a failure"
    lines = [line.strip() for line in (evidence.hang_report.splitlines() if evidence.hang_report else others)]
    return Finding(
        "hang" if evidence.hang_report else "failure",
        "end",
        f"{title} ended the run: {first}",
        tuple(line for line in lines if line)[:8],
        "mend the cause; the same command resumes from the newest checkpoint",
    )


def _not_finite(evidence: Evidence) -> Finding | None:
    report = evidence.report
    if not report.non_finite:
        return None
    step = report.non_finite[0]
    row = report.steps["step"].index(step)
    prefix = "layer_grad_norms."
    marked = evidence.non_finite.get("non_finite") or {}
    layers = [name.removeprefix(prefix) for name in marked if name.startswith(prefix)]
    norms = evidence.non_finite.get("layer_grad_norms") or {}
    before = [value for value in report.steps.get("grad_norm", [])[max(0, row - 20) : row] if value == value]
    growth = before[-1] / min(before) if before and min(before) > 0 else 1.0
    evidence_texts = [
        f"{count_text(len(report.non_finite), 'step')} with NaN or infinity, the first is {step:,}"
    ]
    if layers and len(layers) < len(norms):
        evidence_texts.append(f"at that step the gradients of {', '.join(layers[:5])} are not finite")
    if growth > MAX_NORM_GROWTH:
        evidence_texts.append(f"the gradient norm had grown {growth:,.0f} times in the steps before")
        change = "lower train.learning_rate, or lengthen train.warmup_steps"
    elif not layers:
        evidence_texts.append("the gradient norm had not grown before")
        change = (
            "look at the samples of the step, which its message names; data.bad_data = 'skip' leaves them out"
        )
    else:
        change = "look at that layer's operations: a division or logarithm of zero, a mask without an entry"
    return Finding("not_finite", "wrong", "the loss or gradient is not finite", tuple(evidence_texts), change)


def _learning_rate(evidence: Evidence) -> Finding | None:
    losses = [value for value in evidence.report.steps.get("loss", []) if value == value]
    if len(losses) < 50 or evidence.report.non_finite:
        return None
    quarter = len(losses) // 4
    lowest, newest = min(_smooth(losses)), median(losses[-quarter:])
    first = median(losses[:5])
    if newest <= lowest + 0.25 * abs(first - lowest) or newest <= 1.1 * lowest:
        return None
    return Finding(
        "learning_rate",
        "wrong",
        "the loss rises: the training diverges",
        (f"the loss was {number_text(lowest)} and is {number_text(newest)} now",),
        "lower train.learning_rate, lengthen train.warmup_steps, or set train.gradient_clip; resume from a "
        "checkpoint before the rise",
    )


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """Return medians of neighbouring values."""
    return [median(values[index : index + width]) for index in range(0, len(values) - width + 1, width)]


def _straggler(evidence: Evidence) -> Finding | None:
    slow = _slowest(evidence)
    if slow is None or evidence.step_seconds is None:
        return None
    rank, peers_seconds = slow
    seconds = (rank.compute_seconds or 0.0) + (rank.data_seconds or 0.0)
    lost = (seconds - peers_seconds) / evidence.step_seconds
    peers = [work for work in evidence.ranks if work.rank != rank.rank]
    texts = [
        f"rank {rank.rank} on node {rank.node} works {duration_text(seconds)} a step, its peers "
        f"{duration_text(peers_seconds)}"
    ]
    peer_cores = median(work.cores for work in peers if work.cores is not None) if peers else None
    waits_for_data = (rank.data_seconds or 0.0) > (seconds - peers_seconds) / 2
    if waits_for_data:
        cause, change = "waits for its data", "look at the store and the disk of that node"
    elif rank.cores is not None and peer_cores and rank.cores < 0.8 * peer_cores:
        texts.append(f"it gets {rank.cores:.2f} processors, its peers {peer_cores:.2f}")
        cause = "does not get its processors: a limit, or another program on its node"
        change = "find the other program, or the limit (cpu.max of its control group)"
    else:
        cause = "computes more slowly: a throttled or slower device"
        change = (
            "look at clocks and temperature of its device; parallel.load_balancing = 'on' moves work away"
        )
    return Finding(
        "straggler", "slow", f"all ranks wait for rank {rank.rank}, which {cause}", tuple(texts), change, lost
    )


def _slowest(evidence: Evidence) -> tuple[RankWork, float] | None:
    """Return the slowest rank and its peers' median of seconds, if it stands out."""
    works = [work for work in evidence.ranks if work.compute_seconds is not None]
    if len(works) < 2 or not evidence.step_seconds:
        return None
    seconds = {work.rank: (work.compute_seconds or 0.0) + (work.data_seconds or 0.0) for work in works}
    slowest = max(works, key=lambda work: seconds[work.rank])
    peers = median(value for rank, value in seconds.items() if rank != slowest.rank)
    lost = seconds[slowest.rank] - peers
    if lost < MIN_SHARE * evidence.step_seconds or seconds[slowest.rank] < STRAGGLER_RATIO * peers:
        return None
    return slowest, peers


_AXES = {
    "data": (
        "gradients between replicas or shards",
        "parallel.compression, parallel.all_reduce = 'hierarchical', "
        "a larger train.global_batch, or parallel.synchronize for slow links",
    ),
    "tensor": ("tensor parallelism", "a smaller parallel.tp, within one node"),
    "context": ("context parallelism", "a smaller parallel.cp, or shorter sequences"),
    "expert": ("experts", "a smaller parallel.ep, within one node"),
    "pipeline": ("activations between stages", "more micro-batches, or fewer parallel.pp"),
}


def _communication(evidence: Evidence) -> Finding | None:
    if _slowest(evidence) is not None or not evidence.step_seconds:
        return None  # the others' waits for a straggler look like communication
    kinds = {kind: evidence.parts.get(kind, 0.0) for kind in _AXES}
    kind = max(kinds, key=kinds.__getitem__)
    share = kinds[kind] / evidence.step_seconds
    if share < MIN_SHARE:
        return None
    name, change = _AXES[kind]
    step, exposed = duration_text(evidence.step_seconds), duration_text(kinds[kind])
    texts = [f"{exposed} of {step} a step are exposed communication"]
    forecast = (evidence.report.forecast.get("step") or {}).get(kind)
    if forecast:
        texts.append(f"forecast {duration_text(forecast)}")
        if kinds[kind] > 2 * forecast:
            texts.append("the link is slower than planned: `wanma bench machine` measures it")
    return Finding("communication", "slow", f"ranks wait for {name}", tuple(texts), change, share)


def _data(evidence: Evidence) -> Finding | None:
    share = evidence.share("loading")
    if share < MIN_SHARE:
        return None
    texts = [f"{percent_text(share)} of the step are waits for data"]
    loads, is_store = evidence.load_seconds, False
    if any(loads.values()):
        kind = max(loads, key=loads.__getitem__)
        texts.append(f"{kind} dominates, {duration_text(loads[kind])} of the loader threads a step")
        is_store = kind == "read"
    elif cores := [work.cores for work in evidence.ranks if work.cores is not None]:
        # Waits beside which a rank has no more work than the rest of its step are not computed by it.
        is_store = median(cores) - (1 - share) < share / 2
        texts.append(f"a rank uses {median(cores):.2f} processors")
    if (rate := _read_rate(evidence)) is not None:
        texts.append(f"the disks of node 0 read {bytes_text(rate)}/s")
    if is_store:
        title = "the training waits for the store of its data"
        change = "data.cache keeps what was read on the node; data.workers hide a store that answers late"
        return Finding("slow_store", "slow", title, tuple(texts), change, share)
    title = "the training waits for the work on its samples: decoding, tokenizing, augmentation"
    change = (
        "raise data.workers, with data.worker_processes for Python code; or prepare data once: `wanma data`"
    )
    return Finding("slow_loading", "slow", title, tuple(texts), change, share)


def _read_rate(evidence: Evidence) -> float | None:
    records = evidence.nodes.get(0, ())
    if len(records) < 2 or "disk_read_bytes" not in records[-1] or "disk_read_bytes" not in records[0]:
        return None
    seconds = records[-1]["time"] - records[0]["time"]
    return (records[-1]["disk_read_bytes"] - records[0]["disk_read_bytes"]) / seconds if seconds > 0 else None


def _bubble(evidence: Evidence) -> Finding | None:
    share = evidence.share("bubble")
    if share < MIN_SHARE:
        return None
    return Finding(
        "bubble",
        "slow",
        "stages of the pipeline wait for each other",
        (f"{percent_text(share)} of the step are bubble",),
        "more micro-batches (a smaller parallel.micro_batch, a larger train.global_batch), or a schedule "
        "with virtual stages: `wanma plan` compares them",
        share,
    )


def _checkpoint(evidence: Evidence) -> Finding | None:
    share = evidence.share("checkpoint")
    if share < MIN_SHARE:
        return None
    return Finding(
        "checkpoint",
        "slow",
        "saving checkpoints stops the training",
        (f"{percent_text(share)} of the time are stalls of saves",),
        "raise checkpoint.every_steps, or save to a faster disk and set checkpoint.upload",
        share,
    )


def _host(evidence: Evidence) -> Finding | None:
    share = evidence.share("host") + evidence.share("other")
    if share < 2 * MIN_SHARE:
        return None
    return Finding(
        "host",
        "slow",
        "the loop's own Python, or dispatch of small kernels, takes much of the step",
        (f"{percent_text(share)} of the step are outside computation, communication and data",),
        "parallel.compile = true, a larger parallel.micro_batch; look for slow callbacks and metrics",
        share,
    )


def _leak(evidence: Evidence) -> Finding | None:
    growing = [
        work
        for work in evidence.ranks
        if work.grown_bytes is not None and work.grown_bytes > LEAK_SHARE * work.memory_bytes
        if (work.memory_bytes_per_hour or 0.0) > max(0.05 * work.memory_bytes, 1 << 27)
    ]
    if not growing:
        return None
    worst = max(growing, key=lambda work: work.memory_bytes_per_hour or 0.0)
    return Finding(
        "leak",
        "wrong",
        f"the memory of rank {worst.rank} grows",
        (f"{bytes_text(worst.memory_bytes_per_hour)} an hour; now {bytes_text(worst.memory_bytes)}",),
        "look for tensors that the dataset, a metric or a callback keeps, such as losses with their graph",
    )


def _micro_batch(evidence: Evidence) -> Finding | None:
    plan = evidence.report.plan
    samples, batch = plan.get("micro_batch"), (evidence.report.job.get("train") or {}).get("global_batch")
    ranks = plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    if not samples or not isinstance(batch, int) or plan.get("pp", 1) > 1:
        return None
    count, free, mfu = batch // ranks // samples, evidence.free_memory_share, evidence.mfu
    if samples > SMALL_MICRO_BATCH or count < MANY_MICRO_BATCHES or free is None or free < 0.5:
        return None
    if mfu is not None and mfu > SOUND_MFU:
        return None
    texts = [
        f"a rank computes its samples in {count:,} micro-batches of {count_text(samples, 'sample')}",
        f"{percent_text(free)} of the memory is free",
        *([f"MFU is {percent_text(mfu)}"] if mfu is not None else []),
    ]
    compute = evidence.share("compute") + evidence.share("forward_backward")
    return Finding(
        "small_micro_batch",
        "slow",
        "micro-batches are so small that calls of kernels take longer than their work",
        tuple(texts),
        f"parallel.micro_batch = {min(8 * samples, batch // ranks)}, as far as memory allows",
        compute * (1 - samples / min(8 * samples, batch // ranks)),
    )


def _slow_computation(evidence: Evidence) -> Finding | None:
    forecast = (evidence.report.forecast.get("step") or {}).get("compute")
    measured = evidence.parts.get("compute")
    if not forecast or not measured or measured < 1.5 * forecast or not evidence.step_seconds:
        return None
    if _slowest(evidence) is not None:
        return None
    return Finding(
        "computation",
        "slow",
        "all ranks compute more slowly than forecast",
        (f"{duration_text(measured)} a step, forecast {duration_text(forecast)}",),
        "other programs on the machine, throttled devices, or rates that were assumed: "
        "`wanma cluster --calibrate` measures them",
        (measured - forecast) / evidence.step_seconds,
    )


RULES: Sequence[Rule] = (
    _failure,
    _not_finite,
    _learning_rate,
    _leak,
    _straggler,
    _communication,
    _data,
    _bubble,
    _checkpoint,
    _host,
    _micro_batch,
    _slow_computation,
)
