"""Findings: rules from evidence to a cause, with the change to make; data, each with a test."""

from __future__ import annotations

import math
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
MIN_WORKING_CORES = 0.5
"""Processors in use below which a rank that works longer than its peers is kept from them."""
HIGH_SHARE = 0.25
"""Share of the step that communication may take where no forecast is there to compare it with."""
HOST_SHARE = 0.15
"""Share of the step outside all that is measured from which it is worth a look."""
MICRO_BATCH_SECONDS = 0.02
"""Time of a micro-batch from which the calls of its kernels take little of it."""


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
    if report.state != "failed" or (evidence.non_finite is not None and evidence.non_finite.has_ended_run):
        return None
    first, *others = report.failure.splitlines() or [""]
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
    found = evidence.non_finite
    if found is None:
        return None
    prefix = "layer_grad_norms."
    marked = found.record.get("non_finite") or {}
    layers = [name.removeprefix(prefix) for name in marked if name.startswith(prefix)]
    is_in_layers = 0 < len(layers) < len(found.record.get("layer_grad_norms") or {})
    norms = found.norms_before
    growth = norms[-1] / min(norms) if norms and min(norms) > 0 else 1.0
    texts = [evidence.report.failure.partition("\n")[0]] if found.has_ended_run else []
    if found.steps:
        texts.append(
            f"{count_text(len(found.steps), 'step')} with NaN or infinity, the first is {found.steps[0]:,}"
        )
    if is_in_layers:
        texts.append(f"the gradients of {', '.join(layers[-5:])} are not finite, those of other layers are")
    if found.is_in_data:
        texts.append("samples of the step have NaN or infinity themselves")
        change = (
            "look at the samples of the step, which its message names; data.bad_data = 'skip' leaves them out"
        )
    elif growth > MAX_NORM_GROWTH:
        texts.append(f"the gradient norm had grown {growth:,.0f} times in the steps before")
        change = "lower train.learning_rate, or lengthen train.warmup_steps"
    else:
        texts.append("the gradient norm had not grown before, and no sample was found that is not finite")
        where = "the backward of the last of these layers" if is_in_layers else "the model's operations"
        change = f"look at {where}: a division, root or logarithm of zero, a mask without an entry"
    urgency: Urgency = "end" if found.has_ended_run else "wrong"
    return Finding("not_finite", urgency, "the loss or gradient is not finite", tuple(texts), change)


def _learning_rate(evidence: Evidence) -> Finding | None:
    losses = [value for value in evidence.report.steps.get("loss", []) if value == value]
    if len(losses) < 50 or evidence.non_finite is not None:
        return None
    # Medians of wide windows: the least of many narrow ones lies far below a flat, noisy loss.
    width = max(10, len(losses) // 20)
    smooth = [median(losses[at : at + width]) for at in range(0, len(losses) - width + 1, width)]
    first, lowest, highest = median(losses[:5]), min(smooth), max(smooth)
    newest = median(losses[-(len(losses) // 4) :])
    if newest > lowest + max(0.25 * abs(first - lowest), 0.1 * abs(lowest)):
        title = "the loss rises: the training diverges"
        text = f"the loss was {number_text(lowest)} and is {number_text(newest)} now"
    elif highest > first + 2 * abs(first - lowest):
        title = "the loss rose far above that of the first steps, and came back"
        text = f"it began at {number_text(first)}, and rose to {number_text(highest)} and more"
    else:
        return None
    return Finding(
        "learning_rate",
        "wrong",
        title,
        (text,),
        "lower train.learning_rate, lengthen train.warmup_steps, or set train.gradient_clip; resume from a "
        "checkpoint before the rise",
    )


def _straggler(evidence: Evidence) -> Finding | None:
    slow = _slowest(evidence)
    if slow is None or evidence.step_seconds is None:
        return None
    rank, peers = slow
    seconds, peer_seconds = _work_seconds(rank), median(map(_work_seconds, peers))
    additional = seconds - peer_seconds
    texts = [
        f"rank {rank.rank} on node {rank.node} works {duration_text(seconds)} a step, its peers "
        f"{duration_text(peer_seconds)}"
    ]
    peer_cores = [work.cores for work in peers if work.cores is not None]
    # Peers sleep while they wait, so only the processor time of a whole step can be compared.
    used = None
    if rank.cores is not None and peer_cores and evidence.report.plan.get("device") != "cuda":
        used = max((rank.cores - median(peer_cores)) * evidence.step_seconds / additional, 0.0)
    if (rank.data_seconds or 0.0) > additional / 2:
        if median(work.data_seconds or 0.0 for work in peers) >= MIN_SHARE * evidence.step_seconds:
            return None  # all wait for data, some longer than others
        cause, change = "waits for its data", "look at the store and the disk of that node"
    elif used is not None and used < MIN_WORKING_CORES:
        texts.append(f"in the additional time it uses {used:.2f} processors")
        cause = "does not get its processors: a limit, or another program on its node"
        change = "find the other program, or the limit (cpu.max of its control group)"
    else:
        cause = "computes more slowly: a throttled or slower device"
        change = (
            "look at clocks and temperature of its device; parallel.load_balancing = 'on' moves work away"
        )
    title = f"all ranks wait for rank {rank.rank}, which {cause}"
    return Finding("straggler", "slow", title, tuple(texts), change, additional / evidence.step_seconds)


def _slowest(evidence: Evidence) -> tuple[RankWork, Sequence[RankWork]] | None:
    """Return the rank that loses most time beside its peers, and these, if one stands out."""
    works = [work for work in evidence.ranks if work.compute_seconds is not None]
    slowest: tuple[RankWork, Sequence[RankWork]] | None = None
    most = MIN_SHARE * (evidence.step_seconds or math.inf)
    for group in {work.peer_group for work in works}:
        rank, *peers = sorted(
            (work for work in works if work.peer_group == group), key=_work_seconds, reverse=True
        )
        peer_seconds = median(map(_work_seconds, peers)) if peers else math.inf
        lost = _work_seconds(rank) - peer_seconds
        if lost >= most and _work_seconds(rank) >= STRAGGLER_RATIO * peer_seconds:
            slowest, most = (rank, peers), lost
    return slowest


def _work_seconds(work: RankWork) -> float:
    return (work.compute_seconds or 0.0) + (work.data_seconds or 0.0)


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


def _forecast(evidence: Evidence, kind: str) -> tuple[float, float]:
    """Return the forecast seconds of a step by kind, and the end of their interval; 0: there is none."""
    step = evidence.report.forecast.get("step") or {}
    seconds = step.get(kind) or 0.0
    return seconds, seconds * (1.0 + (step.get("uncertainty") or 0.0))


def _communication(evidence: Evidence) -> Finding | None:
    if _slowest(evidence) is not None or not evidence.step_seconds:
        return None  # the others' waits for a straggler look like communication
    kinds = {kind: evidence.parts.get(kind, 0.0) for kind in _AXES}
    kind = max(kinds, key=kinds.__getitem__)
    share = kinds[kind] / evidence.step_seconds
    forecast, most = _forecast(evidence, kind)
    if share < MIN_SHARE or kinds[kind] <= (most or HIGH_SHARE * evidence.step_seconds):
        return None
    name, change = _AXES[kind]
    step, exposed = duration_text(evidence.step_seconds), duration_text(kinds[kind])
    texts = [f"{exposed} of {step} a step are exposed communication"]
    if forecast:
        texts.append(f"forecast {duration_text(forecast)}")
        if kinds[kind] > 2 * forecast:
            texts.append("the link is slower than planned: `wanma bench machine` measures it")
    return Finding("communication", "slow", f"ranks wait for {name}", tuple(texts), change, share)


def _data(evidence: Evidence) -> Finding | None:
    share = evidence.share("loading")  # of rank 0
    if evidence.step_seconds and evidence.ranks:
        waits = [(work.data_seconds or 0.0) / evidence.step_seconds for work in evidence.ranks]
        if min(waits) >= MIN_SHARE:  # all wait, some longer than rank 0
            share = max(share, min(median(waits), 1.0))
    if share < MIN_SHARE:
        return None
    texts = [f"{percent_text(share)} of the step are waits for data"]
    loads = evidence.load_seconds
    kind = max(loads, key=loads.__getitem__) if any(loads.values()) else ""
    is_store = kind == "read"
    if kind:
        texts.append(f"{kind} dominates, {duration_text(loads[kind])} of the loader threads a step")
    cores = [work.cores for work in evidence.ranks if work.cores is not None]
    if cores and kind in ("", "dataset"):
        # Waits beside which a rank has no more work than the rest of its step are not computed by it.
        is_store = median(cores) - (1 - share) < share / 2
        texts.append(f"a rank uses {median(cores):.2f} processors")
    if is_store:
        title = "the training waits for the store of its data"
        change = "data.cache keeps what was read on the node; data.workers hide a store that answers late"
        return Finding("slow_store", "slow", title, tuple(texts), change, share)
    title = "the training waits for the work on its samples: decoding, tokenizing, augmentation"
    change = (
        "raise data.workers, with data.worker_processes for Python code; or prepare data once: `wanma data`"
    )
    return Finding("slow_loading", "slow", title, tuple(texts), change, share)


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
    if share < HOST_SHARE:
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
    compute = evidence.parts.get("compute", 0.0) + evidence.parts.get("forward_backward", 0.0)
    if not evidence.step_seconds or compute > count * MICRO_BATCH_SECONDS:
        return None
    texts = [
        f"a rank computes its samples in {count:,} micro-batches of {count_text(samples, 'sample')}",
        f"{percent_text(free)} of the memory is free",
        *([f"MFU is {percent_text(mfu)}"] if mfu is not None else []),
    ]
    larger = min(8 * samples, batch // ranks)
    return Finding(
        "small_micro_batch",
        "slow",
        "micro-batches are so small that calls of kernels take longer than their work",
        tuple(texts),
        f"parallel.micro_batch = {larger}, as far as memory allows",
        compute / evidence.step_seconds * (1 - samples / larger),
    )


def _slow_computation(evidence: Evidence) -> Finding | None:
    forecast, most = _forecast(evidence, "compute")
    measured = evidence.parts.get("compute")
    if not forecast or not measured or measured < max(1.5 * forecast, most) or not evidence.step_seconds:
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
