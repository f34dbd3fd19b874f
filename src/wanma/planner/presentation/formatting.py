"""Names of the kinds of time and memory for terminal, page and JSON, and plans in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from wanma.job.cluster import Cluster
from wanma.job.errors import first_names
from wanma.job.forecast.forecast import (
    MEMORY_KINDS,
    STEP_TIME_KINDS,
    Forecast,
    RunCost,
    StepTime,
    Workload,
)
from wanma.job.plan.plan import MESH_DIMS, Plan
from wanma.observe.units import bytes_text, count_text, duration_text, number_text, percent_text
from wanma.planner.rules.compression import compression_text


class TimeKind(NamedTuple):
    """Kind of a step's time, with its appearance."""

    field: str
    """Field of `StepTime`."""
    colour: int
    """Number of a colour, 1 to 8, as in page.css."""
    style: str
    """Colour in the terminal, a style of rich."""
    glyph: str
    """Character of the terminal's bar, distinct also without colours."""

    @property
    def name(self) -> str:
        return STEP_TIME_KINDS[self.field]


TIME_KINDS = (
    TimeKind("compute", 1, "blue", "█"),
    TimeKind("tensor", 2, "yellow", "▓"),
    TimeKind("context", 8, "cyan", "c"),
    TimeKind("expert", 4, "magenta", "e"),
    TimeKind("data", 3, "green", "▒"),
    TimeKind("moving", 6, "bright_yellow", "m"),
    TimeKind("bubble", 7, "bright_black", "░"),
    TimeKind("optimizer", 5, "red", "o"),
    TimeKind("loading", 6, "bright_red", "l"),
    TimeKind("checkpoint", 6, "bright_red", "s"),
)

MEMORY_COLOURS = dict(zip(MEMORY_KINDS, (1, 3, 5, 2, 4, 8, 7, 6), strict=True))
"""Number of a colour in page.css by field of a forecast."""

MIN_SHOWN_CHECKPOINT_SHARE = 0.05
"""Share of a node's host memory below which in-memory checkpoints are not mentioned."""


def time_shares(step: StepTime) -> list[tuple[TimeKind, float, float]]:
    """Return (kind, seconds, share of the step) of the kinds that take time, in a fixed order."""
    return [
        (kind, seconds, seconds / step.seconds)
        for kind in TIME_KINDS
        if (seconds := getattr(step, kind.field)) > 0
    ]


def memory_parts(forecast: Forecast) -> list[tuple[str, str, int]]:
    """Return (field, name, bytes) of the kinds that take memory."""
    return [(field, name, size) for field, name in MEMORY_KINDS.items() if (size := getattr(forecast, field))]


def mesh_text(plan: Plan) -> str:
    """Return the mesh dimensions in words: 'pp 4 × dp_shard 16 × tp 8'.

    For a replica placement, the number of replicas with the `tp` of their stages: '4 × (3 × 8, 4) + 2 × (4)'.
    """
    if plan.placement:
        return " + ".join(
            f"{replicas.count} × ({_runs_text([place.tp for place in replicas.places], ', ')})"
            for replicas in plan.placement
        )
    sizes = [f"{axis} {getattr(plan, axis)}" for axis in (*MESH_DIMS, "ep") if getattr(plan, axis) > 1]
    return " × ".join(sizes) or "one rank"


def settings_text(plan: Plan) -> str:
    """Return the settings of a plan in words.

    Example: 'parameters sharded, micro-batch 2, interleaved_1f1b × 4, selective recompute of 50%'.
    """
    return ", ".join(_settings(plan))


def gradient_reduction_text(plan: Plan) -> str:
    """Return the gradient reduction in words; empty where FSDP2 reduces them, or nothing is reduced.

    Example: 'buckets of 8.0 MiB, hierarchical all-reduce, overlapped with backward'.
    """
    if not plan.computes_on_master_weights or plan.replicate_group_size == 1:
        return ""
    parts = [f"buckets of {bytes_text(plan.bucket_bytes)}"]
    parts += [all_reduce_text(plan)] if plan.all_reduce != "backend" else []
    is_beside = plan.overlap and plan.pp == 1
    return ", ".join([*parts, "overlapped with backward" if is_beside else "after the last backward"])


def all_reduce_text(plan: Plan) -> str:
    """Return the algorithm of the replicas' all-reduce in words, such as 'halving-doubling all-reduce'."""
    return f"{plan.all_reduce.replace('_', '-')} all-reduce"


def _settings(plan: Plan) -> Iterable[str]:
    if plan.shard != "none":
        yield f"{plan.shard} sharded"
    if plan.placement:
        yield "different replicas"
        return
    yield f"micro-batch {plan.micro_batch}"
    if plan.pp > 1:
        yield plan.schedule + (f" × {plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    if plan.recompute != "none":
        share = f" of {plan.recompute_share:.0%}" if plan.recompute_share < 1 else ""
        yield f"{plan.recompute} recompute{share}"
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "no sequence parallelism"
    if plan.cp > 1:
        yield plan.cp_method
    if plan.all_reduce != "backend":
        yield all_reduce_text(plan)
    if plan.compile:
        yield "compiled"
    if "bf16" in plan.approximate:
        yield "bf16"
    if plan.fp8:
        yield "fp8"
    if words := compression_text(plan):
        yield f"gradients {words}"
    for kind in ("parameters", "optimizer", "activations"):
        if (target := getattr(plan, f"offload_{kind}")) != "none":
            yield f"{kind} offloaded to {target}"
    if plan.batch_shares:
        yield "uneven batch shares"
    if plan.synchronization is not None:
        yield str(plan.synchronization)


def share_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Return the shares of the batch and devices of each kind of replica; empty for equal ranks.

    Examples: '32 data ranks on H100 SXM: 1.56% of the batch each',
    '4 replicas, 60% of the batch: 22 blocks on 8 × H100 SXM → 2 stages of 5 blocks on 4 × A100 SXM'.
    """
    if not plan.batch_shares:
        return []
    total = sum(plan.batch_shares)
    if not plan.placement:
        data_ranks = zip(_data_rank_places(plan, cluster), plan.batch_shares, strict=True)
        groups = [(place, share, len(list(equal))) for (place, share), equal in groupby(data_ranks)]
        return [
            f"{count_text(n, 'data rank')}{place}: {share / total:.2%} of the batch each"
            for place, share, n in groups
        ]
    lines, first_rank = [], 0
    for replicas in plan.placement:
        share = replicas.count * plan.batch_shares[first_rank] / total
        first_rank += replicas.count
        equal_places = groupby(replicas.places, lambda place: (place.node, place.tp))
        places = [
            f"{_stages_text([place.blocks for place in stages])} on {tp} × "
            f"{cluster.nodes[node].devices[0].name}"
            for (node, tp), stages in ((key, list(places)) for key, places in equal_places)
        ]
        lines.append(
            f"{count_text(replicas.count, 'replica')}, {share:.0%} of the batch: {' → '.join(places)}"
        )
    return lines


def _data_rank_places(plan: Plan, cluster: Cluster) -> list[str]:
    """Return ' on KIND' for each data rank: the kind of its node, or '' where it has no kind of its own."""
    nodes = [group for group in cluster.nodes for _ in range(group.count)]
    ranks_per_node, remainder = divmod(plan.world_size, len(nodes))
    if len(cluster.nodes) == 1 or remainder or plan.pp > 1:
        return [""] * plan.data_parallel_size
    ranks = plan.world_size // plan.data_parallel_size
    groups = [nodes[data_rank * ranks // ranks_per_node] for data_rank in range(plan.data_parallel_size)]
    return [f" on {group.devices[0].name if group.devices else group.name}" for group in groups]


def _stages_text(stages: Sequence[int]) -> str:
    """Return the blocks of neighbouring stages on devices of one kind in words.

    Examples: '22 blocks', '4 stages of 5 blocks', '4 stages of 3 + 2 × 4 + 1 blocks'.
    """
    blocks = _runs_text(stages, " + ") if len(set(stages)) > 1 else f"{stages[0]}"
    unit = "block" if blocks == "1" else "blocks"
    return f"{len(stages)} stages of {blocks} {unit}" if len(stages) > 1 else f"{blocks} {unit}"


def _runs_text(numbers: Sequence[int], between: str) -> str:
    """Join numbers, with runs of equal ones as length × number: '3 × 4, 2'."""
    runs = [(number, len(list(equal))) for number, equal in groupby(numbers)]
    return between.join(f"{count} × {number}" if count > 1 else f"{number}" for number, count in runs)


def step_seconds_text(step: StepTime | None) -> str:
    """Return the step time with its uncertainty: '1.01 s ± 12%'."""
    if step is None:
        return "–"
    uncertainty = f" ± {step.uncertainty:.0%}" if step.uncertainty else ""
    return f"{duration_text(step.seconds)}{uncertainty}"


def throughput(forecast: Forecast, workload: Workload | None) -> float | None:
    """Return the throughput in tokens/s, or in samples/s where a sample has one target."""
    if forecast.samples_per_second is None:
        return None
    return forecast.samples_per_second * (workload.tokens_per_sample if workload else 1)


def throughput_unit(workload: Workload | None) -> str:
    return "tokens/s" if workload is not None and workload.tokens_per_sample > 1 else "samples/s"


def throughput_text(value: float | None) -> str:
    """Return a throughput with three digits, the accuracy of a forecast: '1.23 M'."""
    if value is None:
        return "–"
    for unit, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return number_text(value)


def energy_text(joules: float | None) -> str:
    """Return an energy with three digits and the unit that needs no exponent: '415 kWh', '1.29 GWh'."""
    if joules is None:
        return "–"
    value, units = joules / 3.6e3, ["Wh", "kWh", "MWh", "GWh", "TWh"]
    while len(units) > 1 and float(f"{value:.3g}") >= 1000:
        value, units = value / 1000, units[1:]
    digits = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.01 else "less than 0.01"
    return f"{digits} {units[0]}"


def run_cost_text(forecast: Forecast) -> str:
    """Return duration, energy and price of the whole run; empty without a forecast of it."""
    return cost_text(forecast.run) if forecast.run is not None else ""


def cost_text(cost: RunCost) -> str:
    """Return duration, energy and price, as far as they are known.

    Example: '3 d 04 h, 415 kWh at the wall, price 1,200'.
    """
    parts = [duration_text(cost.seconds)]
    if cost.energy_joules is not None:
        parts.append(f"{energy_text(cost.energy_joules)} at the wall")
    if cost.price is not None:
        parts.append(f"price {number_text(cost.price)}")
    return ", ".join(parts)


def goodput_text(forecast: Forecast) -> str:
    """Return the goodput with the causes of its loss; empty where it is 100 %.

    Causes of less than a tenth of the loss are omitted. Example: 'goodput 98.7 %: a failure every 5 h 12 min,
    4 min 04 s lost each time'.
    """
    goodput = forecast.run.useful if forecast.run is not None else None
    if goodput is None or percent_text(goodput.share) == percent_text(1.0):
        return ""
    causes, threshold = [], 0.1 * (1 - goodput.share)
    if goodput.failure_share >= threshold:
        period, loss = map(duration_text, (goodput.seconds_between_failures, goodput.seconds_per_failure))
        causes.append(f"a failure every {period}, {loss} lost each time")
    if goodput.copying_share >= threshold:
        causes.append(f"in-memory checkpoints take {percent_text(goodput.copying_share)}")
    return f"goodput {percent_text(goodput.share)}: {', '.join(causes)}"


def memory_text(forecast: Forecast) -> str:
    return bytes_text(forecast.memory_bytes)


def in_memory_checkpoint_text(forecast: Forecast, plan: Plan, cluster: Cluster) -> str:
    """Return the host memory of in-memory checkpoints; empty below `MIN_SHOWN_CHECKPOINT_SHARE`.

    Example: '72.0 GiB of 512 GiB per node'.
    """
    node_devices = max(len(node.devices) for node in cluster.nodes)
    ranks = min(node_devices or math.ceil(plan.world_size / cluster.node_count), plan.world_size)
    used, memory = ranks * forecast.snapshots_bytes, min(node.memory_bytes for node in cluster.nodes)
    if used < MIN_SHOWN_CHECKPOINT_SHARE * memory:
        return ""
    return f"{bytes_text(used)} of {bytes_text(memory)} per node"


def pipeline_memory_text(forecast: Forecast) -> str:
    """Return the memory of the ranks of a pipeline, in their order; empty without a pipeline.

    Example: '3.10 GiB, 2.40 GiB, 2.40 GiB, 2.90 GiB'.
    """
    return first_names([bytes_text(rank.memory_bytes) for rank in forecast.pipeline_ranks], 8)


def evenly_spread_indices(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` of `count` indices, evenly spread, with both ends."""
    shown = min(count, max_count)
    return [round(position * (count - 1) / max(shown - 1, 1)) for position in range(shown)]
