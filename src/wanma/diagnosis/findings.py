"""Findings: rules from evidence to a cause, with the change to make; data, each with a test."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from wanma.diagnosis.endings import find_crash, find_failure, find_non_finite
from wanma.diagnosis.evidence import DISPATCH, Evidence
from wanma.diagnosis.finding import MIN_SHARE, Finding, Urgency
from wanma.diagnosis.plan_gain import with_forecasts
from wanma.diagnosis.straggler import find_straggler
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text
from wanma.planner.pipeline.schedules import RECOMPUTED_FORWARDS
from wanma.report.step_parts import HOST, OTHER

MIN_STEPS = 20
"""Number of steps after the first ones below which their times say nothing about the run."""
LEAK_SHARE = 0.02
"""Share of its memory by which a rank must have grown, while it was watched, to count as leaking."""
SMALL_MICRO_BATCH, MANY_MICRO_BATCHES, SOUND_MFU = 2, 8, 0.25
"""Samples of a micro-batch, and number of micro-batches, beside which a lower MFU asks for larger ones."""
HIGH_SHARE = 0.25
"""Share of the step that communication may take where no forecast is there to compare it with."""
NOISE_OF_MEDIAN, NOISE_OF_FIRST = 8.0, 5.0
"""Multiples of the noise, the median distance of a loss from the median of its window, that a flat loss may
rise by: the medians of windows, times the root of the losses in one, and these above the first losses."""
FOREIGN_SHARE = 0.2
"""Share of a node's processors in use by other programs from which they count as a cause."""
SOUND_CORES = 0.8
"""Processors over the share of the time that a rank computes, below which it waits for them."""
LACK_OF_PROCESSORS = frozenset({"communication", "computation", "host", "slow_loading", "slow_store"})
"""Findings that other programs cause on a node without a free processor: all that its ranks do is slow."""
HOST_SHARE = 0.15
"""Share of the step outside all that is measured from which it is worth a look."""
MUCH_FREE_MEMORY = 0.3
"""Share of the memory that is free from which recompute may save more than it needs to."""
MICRO_BATCH_SECONDS = 0.02
"""Time of a micro-batch from which the calls of its kernels take little of it."""


Rule = Callable[[Evidence], Finding | None]


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings, the first cause first: of the end, then of wrong numbers, then of lost time.

    Findings whose change is one of the plan have its forecast, where there can be one.
    """
    findings = [
        finding
        for rule in RULES
        if (finding := rule(evidence)) is not None
        if finding.urgency != "slow" or evidence.steps >= MIN_STEPS
    ]
    if any(finding.name == "other_programs" for finding in findings):
        findings = [finding for finding in findings if finding.name not in LACK_OF_PROCESSORS]
    order: Sequence[Urgency] = ("end", "wrong", "slow")
    findings.sort(key=lambda finding: (order.index(finding.urgency), -finding.lost_share))
    return with_forecasts(evidence.report, findings)


def _learning_rate(evidence: Evidence) -> Finding | None:
    losses = [value for value in evidence.report.steps.get("loss", []) if value == value]
    if len(losses) < 50 or evidence.non_finite:
        return None
    # Medians of wide windows: the least of many narrow ones lies far below a flat, noisy loss.
    width = max(10, len(losses) // 20)
    smooth = [median(losses[at : at + width]) for at in range(0, len(losses) - width + 1, width)]
    first, lowest, highest = median(losses[:5]), min(smooth), max(smooth)
    newest = median(losses[-(len(losses) // 4) :])
    noise = median(abs(value - smooth[at // width]) for at, value in enumerate(losses[: width * len(smooth)]))
    wavering = NOISE_OF_MEDIAN * noise / math.sqrt(width)
    if newest > lowest + max(0.25 * abs(first - lowest), 0.1 * abs(lowest), wavering):
        title = "the loss rises: the training diverges"
        text = f"the loss was {number_text(lowest)} and is {number_text(newest)} now"
    elif highest > first + max(2 * abs(first - lowest), NOISE_OF_FIRST * noise):
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


_AXES = {
    "data": (
        "gradients between replicas or shards",
        "parallel.compression, parallel.all_reduce = 'hierarchical', "
        "a larger train.global_batch, or parallel.synchronize for slow links",
        ("all_reduce", "shard", "tp", "pp"),
    ),
    "tensor": ("tensor parallelism", "a smaller parallel.tp, within one node", ("tp",)),
    "context": ("context parallelism", "a smaller parallel.cp, or shorter sequences", ("cp",)),
    "expert": ("experts", "a smaller parallel.ep, within one node", ("ep",)),
    "pipeline": (
        "activations between stages",
        "more micro-batches, or fewer parallel.pp",
        ("micro_batch", "pp"),
    ),
}


def _forecast(evidence: Evidence, kind: str) -> tuple[float, float]:
    """Return the forecast seconds of a step by kind, and the end of their interval; 0: there is none."""
    step = evidence.report.forecast.get("step") or {}
    seconds = step.get(kind) or 0.0
    return seconds, seconds * (1.0 + (step.get("uncertainty") or 0.0))


def _waits_for_work(evidence: Evidence) -> float:
    """Return the seconds of a step in which rank 0 waits for a rank with more work that is no straggler."""
    first = next((work for work in evidence.ranks if work.rank == 0), None)
    if first is None:
        return 0.0
    peers = [work.work_seconds for work in evidence.ranks if first.is_peer(work)]
    return max((seconds - first.work_seconds for seconds in (first.work_seconds, *peers)), default=0.0)


def _other_programs(evidence: Evidence) -> Finding | None:
    if evidence.report.plan.get("device") == "cuda" or not evidence.foreign_processors:
        return None
    node, share = max(evidence.foreign_processors.items(), key=lambda item: item[1])
    cores = min((work.cores for work in evidence.ranks if work.node == node and work.cores), default=None)
    if share < FOREIGN_SHARE or cores is None or cores > SOUND_CORES * evidence.share("compute"):
        return None
    return Finding(
        "other_programs",
        "slow",
        f"other programs take processors of node {node} from the ranks",
        (
            f"they use {percent_text(share)} of its processors, and none is free",
            f"a rank computes {percent_text(evidence.share('compute'))} of the time, and gets {cores:.2f} "
            "processors",
        ),
        "end or move the other programs; times of steps say nothing about the run beside them",
        share,
    )


def _communication(evidence: Evidence) -> Finding | None:
    if evidence.stragglers or not evidence.step_seconds:
        return None  # the others' waits for a straggler look like communication
    kinds = {kind: evidence.parts.get(kind, 0.0) for kind in _AXES}
    kinds["data"] -= _waits_for_work(evidence)
    kind = max(kinds, key=kinds.__getitem__)
    share = kinds[kind] / evidence.step_seconds
    forecast, most = _forecast(evidence, kind)
    if share < MIN_SHARE or kinds[kind] <= (most or HIGH_SHARE * evidence.step_seconds):
        return None
    name, change, keys = _AXES[kind]
    step, exposed = duration_text(evidence.step_seconds), duration_text(kinds[kind])
    texts = [f"{exposed} of {step} a step are exposed communication"]
    if forecast:
        texts.append(f"forecast {duration_text(forecast)}")
        if kinds[kind] > 2 * forecast:
            texts.append("the link is slower than planned: `wanma bench machine` measures it")
    return Finding(
        "communication", "slow", f"ranks wait for {name}", tuple(texts), change, share, plan_keys=keys
    )


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
        "raise data.workers, with data.worker_processes = true for Python code; or do that work once, before "
        "the run"
    )
    if kind == "dataset" and not evidence.report.job.get("data", {}).get("worker_processes"):
        change = "set data.worker_processes = true: threads take turns in the Python code of a dataset"
    return Finding("slow_loading", "slow", title, tuple(texts), change, share)


@dataclass(frozen=True)
class PartRule:
    """Rule that names a cause where parts of a step take a large share of it."""

    name: str
    parts: tuple[str, ...]
    least_share: float
    """Least share of the step, 0 to 1."""
    title: str
    evidence: str
    """Evidence after the share in words."""
    change: str
    plan_keys: tuple[str, ...] = ()

    def find(self, evidence: Evidence) -> Finding | None:
        share = sum(map(evidence.share, self.parts))
        if share < self.least_share:
            return None
        text = f"{percent_text(share)} {self.evidence}"
        return Finding(self.name, "slow", self.title, (text,), self.change, share, self.plan_keys)


PART_RULES = (
    PartRule(
        "bubble",
        ("bubble",),
        MIN_SHARE,
        "stages of the pipeline wait for each other",
        "of the step are bubble",
        "more micro-batches (a smaller parallel.micro_batch, a larger train.global_batch), or virtual stages",
        ("micro_batch", "schedule", "pp"),
    ),
    PartRule(
        "checkpoint",
        ("checkpoint",),
        MIN_SHARE,
        "saving checkpoints stops the training",
        "of the time are stalls of saves",
        "raise checkpoint.every_steps, or save to a faster disk and set checkpoint.upload",
    ),
    PartRule(
        "host",
        (HOST, OTHER),
        HOST_SHARE,
        "the loop's own Python takes much of the step",
        "of the step are outside computation, communication and data",
        "look for slow callbacks, metrics and code between steps: `wanma profile` shows them; in steps of a "
        "few milliseconds it is wanma's own: a larger train.global_batch",
    ),
    PartRule(
        "small_kernels",
        (DISPATCH,),
        HOST_SHARE,
        "kernels are so small that the GPU waits for their dispatch",
        "of the step no kernel runs in forward and backward",
        "parallel.compile = true, or a larger parallel.micro_batch",
        ("micro_batch", "compile"),
    ),
)


def _recompute(evidence: Evidence) -> Finding | None:
    plan, free = evidence.report.plan, evidence.free_memory_share
    forwards = RECOMPUTED_FORWARDS.get(plan.get("recompute", "none"), 0.0) * plan.get("recompute_share", 1.0)
    # Backward takes as long as two forwards.
    share = (evidence.share("compute") + evidence.share("forward_backward")) * forwards / (3 + forwards)
    if share < MIN_SHARE or free is None or free < MUCH_FREE_MEMORY:
        return None
    return Finding(
        "recompute",
        "slow",
        "backward recomputes activations that memory could keep",
        (f"parallel.recompute = '{plan['recompute']}', and {percent_text(free)} of the memory is free",),
        "parallel.recompute = 'none' or 'selective', or a smaller parallel.recompute_share",
        share,
        plan_keys=("recompute",),
        needs_gain=True,
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
        plan_keys=("micro_batch",),
    )


def _slow_computation(evidence: Evidence) -> Finding | None:
    forecast, most = _forecast(evidence, "compute")
    measured = evidence.parts.get("compute")
    if not forecast or not measured or measured < max(1.5 * forecast, most) or not evidence.step_seconds:
        return None
    if evidence.stragglers:
        return None
    return Finding(
        "computation",
        "slow",
        "all ranks compute more slowly than forecast",
        (f"{duration_text(measured)} a step, forecast {duration_text(forecast)}",),
        "other programs on the machine, throttled devices, or rates that were assumed: "
        "`wanma bench machine --save` measures them",
        (measured - forecast) / evidence.step_seconds,
    )


RULES: Sequence[Rule] = (
    find_crash,
    find_failure,
    find_non_finite,
    _learning_rate,
    _leak,
    find_straggler,
    _other_programs,
    _communication,
    _data,
    *(rule.find for rule in PART_RULES),
    _recompute,
    _micro_batch,
    _slow_computation,
)
