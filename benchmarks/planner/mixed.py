"""Plans on unlike nodes beside each kind alone and an even split, by simulation; and the search time.

One part runs at a time; results are kept in planner-mixed.json and written as a page.

    python -m benchmarks.planner.mixed --part gain --model opt-350m
    python -m benchmarks.planner.mixed --part gain --model gpt-neo-2.7b
    python -m benchmarks.planner.mixed --part time --scale 962
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import RESULTS, commit, machine, table
from benchmarks.planner.step_simulation import simulate_step
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.plan.placement import ReplicaPlacement
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.config.presets import PRETRAINED_PRESETS
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.forecast.problem import USABLE_DEVICE_MEMORY_SHARE, PlanningProblem, build_problem
from wanma.planner.heterogeneous.costs import HeterogeneousCosts
from wanma.planner.heterogeneous.node_pools import HeterogeneousHardware, build_heterogeneous_hardware
from wanma.planner.heterogeneous.placement_search import search_placements
from wanma.planner.search.result import Candidate

SAILOR = "16x8 A100 SXM 40GB, 4x100G + 48x8 V100 SXM2 16GB, 4x100G"
# As wide and deep as the published ones, but with three matrices of 8/3 hidden in each feed-forward network,
# which have the parameters of two of 4 hidden.
MODELS = {
    "opt-350m": DecoderConfig(24, 1024, 16, 16, 2752, 50272, tie_embeddings=True),
    "gpt-neo-2.7b": DecoderConfig(32, 2560, 20, 20, 6912, 50304, tie_embeddings=True),
}
FOUR_KINDS = (
    ("H100 SXM", 4, "8x400G"),
    ("A100 SXM 80GB", 5, "8x200G"),
    ("H200 SXM", 2, "8x400G"),
    ("A100 SXM 40GB", 2, "4x100G"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("gain", "time"), required=True)
    parser.add_argument("--model", choices=MODELS, default="opt-350m")
    parser.add_argument("--scale", type=int, default=1, help="time: 104 devices of four kinds, so many times")
    options = parser.parse_args()
    path = RESULTS / "planner-mixed.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"gain": {}, "time": {}}
    if options.part == "gain":
        kept["gain"][options.model] = gain(MODELS[options.model])
    else:
        kept["time"][str(104 * options.scale)] = search_time(options.scale)
    kept["machine"], kept["commit"] = machine(), commit()
    path.write_text(json.dumps(kept, indent=1) + "\n")
    text = page(kept)
    (RESULTS / "planner-mixed.md").write_text(text)
    print(text)


def setting(
    cluster: str, dimensions: DecoderConfig, batch: int, sequence: int, precision: str
) -> tuple[PlanningProblem, HeterogeneousHardware]:
    job = Job.model_validate(
        {
            "model": {"family": "decoder"},
            "data": {"text": "stdlib", "sequence_length": sequence},
            "train": {"global_batch": batch, "precision": precision},
        }
    )
    machines = parse_shorthand(cluster)
    problem = build_problem(job, machines, compute_decoder_workload(dimensions, sequence), dimensions)
    return problem, build_heterogeneous_hardware(machines, USABLE_DEVICE_MEMORY_SHARE)


def gain(dimensions: DecoderConfig) -> dict[str, Any]:
    """Return the simulated times of the best plan, of each kind alone and of the even split."""
    problem, fleet = setting(SAILOR, dimensions, 2048, 2048, "fp16")
    start = Plan(precision="fp16", device="cuda")
    began = time.process_time()
    found = search_placements(problem, fleet, start)
    taken = time.process_time() - began
    costs = HeterogeneousCosts(problem, fleet, replace(start, sequence_parallel=True))
    best = found.candidates[0]
    rows = [row("best", best, costs, fleet)]
    for number, kind in enumerate(fleet.pools):
        alone = next(one for one in found.candidates if nodes(one.plan) == {number})
        rows.append(row(f"{kind.name} alone", alone, costs, fleet))
        if number == smallest(fleet):
            rows.append(row("even split", even_split(alone, fleet, problem.global_batch), costs, fleet))
    return {"seconds": taken, "rows": rows}


def smallest(fleet: HeterogeneousHardware) -> int:
    """Return the kind with the least memory, whose plan all devices can run."""
    return min(range(len(fleet.pools)), key=lambda number: fleet.pools[number].memory_limit_bytes)


def even_split(alone: Candidate, fleet: HeterogeneousHardware, batch: int) -> Candidate:
    """Return replicas as in the smallest kind's best plan on all devices, with equal shares of the batch."""
    (like,) = alone.plan.placement
    each = sum(place.tp for place in like.places)
    placement = tuple(
        ReplicaPlacement(
            kind.device_count // each,
            tuple(replace(place, node=number) for place in like.places),
            like.micro_batch,
            like.recompute,
        )
        for number, kind in enumerate(fleet.pools)
    )
    count = sum(one.count for one in placement)
    base, extra = divmod(batch, count)
    shares = tuple(base + (number < extra) for number in range(count))
    plan = replace(alone.plan, placement=placement, batch_shares=shares, dp_replicate=count)
    return replace(alone, plan=plan)


def nodes(plan: Plan) -> set[int]:
    return {place.node for one in plan.placement for place in one.places}


def row(name: str, one: Candidate, costs: HeterogeneousCosts, fleet: HeterogeneousHardware) -> list[Any]:
    batch = costs.problem.global_batch
    return [
        name,
        words(one.plan, fleet),
        one.seconds if name != "even split" else None,
        simulate_step(costs, one.plan, batch),
    ]


def words(plan: Plan, fleet: HeterogeneousHardware) -> str:
    """Return a text such as '128 × (24 A100 SXM 40 GB) of 7–8 samples in micro-batches of 4'."""
    parts, first = [], 0
    for one in plan.placement:
        stages = ", ".join(
            f"{place.blocks} {fleet.pools[place.node].name}{f' tp {place.tp}' if place.tp > 1 else ''}"
            for place in one.places
        )
        sizes = plan.batch_shares[first : first + one.count]
        first += one.count
        samples = str(sizes[0]) if min(sizes) == max(sizes) else f"{min(sizes)}–{max(sizes)}"
        again = "" if one.recompute == "none" else f", {one.recompute} recompute"
        parts.append(
            f"{one.count} × ({stages}), {samples} samples in micro-batches of {one.micro_batch}{again}"
        )
    return "; ".join(parts)


def search_time(scale: int) -> dict[str, Any]:
    """Return the search time of Llama 3 70B on four kinds of devices."""
    cluster = " + ".join(f"{scale * count}x8 {name}, {cards}" for name, count, cards in FOUR_KINDS)
    batch = min(max(256 * scale, 256), 16384)
    problem, fleet = setting(cluster, PRETRAINED_PRESETS["llama-3-70b"], batch, 4096, "bf16")
    began = time.process_time()
    found = search_placements(problem, fleet, Plan(precision="bf16", device="cuda"))
    best, alone = found.candidates[0], [one for one in found.candidates if len(nodes(one.plan)) == 1]
    return {
        "seconds": time.process_time() - began,
        "batch": batch,
        "step": best.seconds,
        "alone": min(one.seconds for one in alone) if alone else None,
    }


def page(kept: dict[str, Any]) -> str:
    lines = [
        "# Plans for heterogeneous clusters",
        "",
        f"{kept['machine']}; wanma at {kept['commit']}. `python -m benchmarks.planner.mixed`;",
        "searches in CPU seconds of one core.",
        "",
        f"## {SAILOR}",
        "",
        "Sailor's mixture (Strati et al. 2025); 2,048 sequences of 2,048 tokens a step, fp16. `played`:",
        "each micro-batch, message and exchange of all replicas as events",
        "(`benchmarks/planner/step_simulation.py`).",
        "The even split: the best plan of the smaller devices on all of them with equal shares of the batch.",
    ]
    for model, found in kept["gain"].items():
        best = found["rows"][0][3]
        rows: list[Sequence[str]] = [
            (
                name,
                plan,
                "–" if forecast is None else f"{forecast:.3f}",
                f"{played:.3f}",
                f"{played / best:.2f}",
            )
            for name, plan, forecast, played in found["rows"]
        ]
        lines += ["", f"### {model}, searched in {found['seconds']:.1f} s", ""]
        lines.append(table(("", "plan", "step, forecast s", "played s", "times the best"), rows).rstrip())
    lines += [
        "",
        "## Time of the search",
        "",
        "Llama 3 70B in bf16 on H100, A100 80 GB, H200 and A100 40 GB (4 : 5 : 2 : 2).",
        "",
    ]
    times: list[Sequence[str]] = [
        (
            f"{int(devices):,}",
            f"{one['batch']:,}",
            f"{one['seconds']:.1f}",
            f"{one['step']:.2f}",
            "–" if one["alone"] is None else f"{one['alone']:.2f}",
        )
        for devices, one in sorted(kept["time"].items(), key=lambda item: int(item[0]))
    ]
    header = ("devices", "sequences a step", "search, s", "best step, s", "best kind alone, s")
    lines += [table(header, times).rstrip(), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
