"""Every axis with every other: the layouts that the parity matrix runs, and the table of what composes.

An axis comes in variants; a case is one variant of one axis, or of several. `wanma`'s own rules say what
cannot be combined and why: such a pair is no case, and its reason is part of the table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.job.sections.parallel import ParallelSection
from wanma.job.sections.train import Precision
from wanma.planner.rules.mesh import check_mesh, check_micro_batches

GLOBAL_BATCH, LENGTH = 7, 32
"""Samples that no number of ranks divides."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate": ("dp_replicate", {"dp_replicate": 2}),
    "ZeRO 1": ("dp_shard", {"dp_shard": 2, "shard": "optimizer"}),
    "ZeRO 2": ("dp_shard", {"dp_shard": 2, "shard": "gradients"}),
    "ZeRO 3": ("dp_shard", {"dp_shard": 2, "shard": "parameters"}),
    "tensor": ("tp", {"tp": 2}),
    "tensor + sequence": ("tp", {"tp": 2, "sequence_parallel": True}),
    "ring": ("cp", {"cp": 2, "cp_method": "ring"}),
    "all-to-all": ("cp", {"cp": 2, "cp_method": "all_to_all"}),
    "gpipe": ("pp", {"pp": 2, "schedule": "gpipe"}),
    "1f1b": ("pp", {"pp": 2, "schedule": "1f1b"}),
    "interleaved": ("pp", {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "zero bubble": ("pp", {"pp": 2, "schedule": "interleaved_zero_bubble", "virtual_stages": 2}),
    "ZBV": ("pp", {"pp": 2, "schedule": "zbv", "virtual_stages": 2}),
    "DualPipeV": ("pp", {"pp": 2, "schedule": "dualpipev", "virtual_stages": 2}),
    "experts": ("ep", {"ep": 2}),
    "recompute": ("recompute", {"recompute": "full"}),
}
"""Name -> (axis, what it sets in a plan)."""

SHARES = ("ZeRO 1", "ZeRO 2", "ZeRO 3", "replicate", "ring", "all-to-all")
"""Mesh dimensions from which `ep` can take its ranks."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"family": "decoder", "layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2},
    "tied": {
        "family": "decoder",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "tie_embeddings": True,
        "dropout": 0.1,
    },
    "GELU": {
        "family": "decoder",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "activation_function": "gelu",
    },
    "experts, balanced by bias": {
        "family": "decoder",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "experts": 4,
        "experts_per_token": 2,
        "expert_feed_forward": 32,
        "shared_experts": 1,
        "dense_layers": 1,
        "balance": "bias",
    },
    "experts, balanced by loss": {
        "family": "decoder",
        "layers": 4,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "experts": 4,
        "experts_per_token": 2,
        "expert_feed_forward": 32,
        "balance": "loss",
        "capacity_factor": 0.9,
    },
    "Llama of transformers": {"huggingface": "llama"},
    "Qwen 2 of transformers, tied": {"huggingface": "qwen2"},
}
"""Model sections; a Hugging Face one names a config that the test writes."""
DENSE = ("dense", "tied", "GELU", "Llama of transformers", "Qwen 2 of transformers, tied")
EXPERTS = ("experts, balanced by bias", "experts, balanced by loss")

TRIPLES = (
    ("replicate", "tensor + sequence", "1f1b"),
    ("ZeRO 3", "tensor + sequence", "1f1b"),
    ("ZeRO 2", "tensor", "interleaved"),
    ("ZeRO 1", "tensor + sequence", "ZBV"),
    ("ZeRO 3", "tensor + sequence", "ring"),
    ("replicate", "ring", "1f1b"),
    ("ZeRO 3", "all-to-all", "zero bubble"),
    ("replicate", "ZeRO 3", "tensor + sequence"),
    ("replicate", "ZeRO 2", "gpipe"),
    ("tensor + sequence", "ring", "1f1b"),
)
"""Layouts of eight ranks."""

FP32 = (
    (("replicate", "tensor"), "dense"),
    (("ZeRO 3", "tensor + sequence"), "tied"),
    (("ZeRO 2", "ring"), "dense"),
    (("replicate", "all-to-all"), "tied"),
    (("ZeRO 1", "1f1b"), "tied"),
    (("tensor + sequence", "interleaved"), "dense"),
    (("ring", "ZBV"), "dense"),
    (("ZeRO 3", "recompute"), "experts, balanced by loss"),
    (("ZeRO 1", "experts"), "experts, balanced by bias"),
)
"""Every axis, in the precision that most jobs are written for."""
DAILY_FP32 = tuple(FP32[place] for place in (3, 5, 7, 8))
"""Smallest part of `FP32` that holds every axis."""


@dataclass(frozen=True)
class Case:
    """One run of the matrix."""

    variants: tuple[str, ...]
    model: str
    precision: Precision = "fp64"

    @property
    def name(self) -> str:
        return f"{' × '.join(self.variants)}: {self.model}"

    @property
    def plan(self) -> Plan:
        settings: dict[str, Any] = {}
        for variant in self.variants:
            settings |= VARIANTS[variant][1]
        plan = Plan(**settings)
        if "experts" in self.variants and plan.dp_replicate * plan.dp_shard * plan.cp == 1:
            plan = replace(plan, dp_replicate=2)
        stages = plan.stage_count
        cuts = tuple(range(4 // stages, 4, 4 // stages)) if stages > 1 else ()
        # A data rank has 7 samples, or 4 and 3: in four micro-batches, which every schedule admits; in two
        # without stages, the second of them smaller. Of four data ranks each has two samples, or one.
        micro_batch = {1: 4, 2: 2}.get(plan.data_parallel_size, 1)
        if plan.pp > 1:
            micro_batch = max(micro_batch // 2, 1)
        return replace(plan, stage_cuts=cuts, micro_batch=micro_batch, precision=self.precision)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(VARIANTS[variant][0] for variant in self.variants)


def pairs() -> list[tuple[str, str]]:
    """Two variants of different axes."""
    return [
        (one, other)
        for one, other in itertools.combinations(VARIANTS, 2)
        if VARIANTS[one][0] != VARIANTS[other][0]
    ]


def cases(exhaustive: bool) -> list[Case]:
    """Cases of `--full`: each combination on one model, and of the schedules every second with
    each other variant in turn; with `exhaustive` all of them and each variant alone, on all models that they
    suit."""
    chosen: list[tuple[str, ...]] = [(variant,) for variant in VARIANTS] if exhaustive else []
    chosen += [pair for pair in pairs() if refusal(pair) is None and (exhaustive or is_sampled(pair))]
    chosen += TRIPLES
    found = []
    turn = {models: itertools.cycle(models) for models in (DENSE, EXPERTS)}
    for variants in chosen:
        models = EXPERTS if "experts" in variants else DENSE
        every = (*models, *EXPERTS) if models is DENSE else models
        found += [Case(variants, model) for model in (every if exhaustive else (next(turn[models]),))]
    return found


def is_sampled(pair: tuple[str, str]) -> bool:
    """Every schedule meets half of the other variants, every other variant half of the schedules."""
    names = list(VARIANTS)
    scheduled = any(VARIANTS[name][0] == "pp" for name in pair)
    return not scheduled or sum(names.index(name) for name in pair) % 2 == 0


DAILY = (
    Case(("ring",), "experts, balanced by loss"),
    Case(("replicate", "ZeRO 2"), "Llama of transformers"),
    Case(("replicate", "ZeRO 3"), "tied"),
    Case(("replicate", "tensor + sequence"), "dense"),
    Case(("replicate", "ring"), "Qwen 2 of transformers, tied"),
    Case(("replicate", "zero bubble"), "experts, balanced by loss"),
    Case(("replicate", "experts"), "experts, balanced by bias"),
    Case(("replicate", "recompute"), "GELU"),
    Case(("ZeRO 1", "recompute"), "experts, balanced by bias"),
    Case(("ZeRO 2", "all-to-all"), "GELU"),
    Case(("ZeRO 2", "experts"), "experts, balanced by loss"),
    Case(("ZeRO 3", "tensor"), "Qwen 2 of transformers, tied"),
    Case(("ZeRO 3", "DualPipeV"), "dense"),
    Case(("tensor", "ring"), "tied"),
    Case(("tensor", "recompute"), "experts, balanced by loss"),
    Case(("tensor", "recompute"), "Llama of transformers"),
    Case(("tensor + sequence", "gpipe"), "GELU"),
    Case(("tensor + sequence", "experts"), "experts, balanced by bias"),
    Case(("ring", "ZBV"), "Llama of transformers"),
    Case(("ring", "experts"), "experts, balanced by bias"),
    Case(("all-to-all", "recompute"), "dense"),
    Case(("1f1b", "recompute"), "Qwen 2 of transformers, tied"),
    Case(("interleaved", "recompute"), "tied"),
    Case(("ZBV", "experts"), "experts, balanced by bias"),
    Case(("experts", "recompute"), "experts, balanced by loss"),
)
"""Few cases, of few ranks, that cover every variant, every pair of axes and every axis with every kind of
model."""


@cache
def refusal(variants: tuple[str, ...]) -> str | None:
    """Reason for which the planner refuses to combine these; None when it does not."""
    plan = Case(variants, "dense").plan
    keys = set(ParallelSection.model_fields) & {field.name for field in fields(Plan)} - {"embedding_tables"}
    job = Job.model_validate(
        {
            "model": MODELS["experts, balanced by bias" if "experts" in variants else "dense"],
            "data": {"sequence_length": LENGTH},
            "train": {"global_batch": GLOBAL_BATCH},
            "parallel": {key: value for key, value in plan.to_json().items() if key in keys},
        }
    )
    try:
        check_mesh(job, plan, Cluster((NodeGroup("here", 64, 1 << 40, ()),)))
        check_micro_batches(job, plan)
    except JobError as error:
        return error.message
    return None


def table() -> str:
    """Table of compositions in Markdown, as in docs/reference/parallel-compatibility.md."""
    names = list(VARIANTS)
    reasons: list[str] = []
    lines = [
        "| | " + " | ".join(names) + " |",
        "| --- |" + " --- |" * len(names),
    ]
    for row in names:
        cells = []
        for column in names:
            if VARIANTS[row][0] == VARIANTS[column][0]:
                cells.append("" if row != column else "·")
                continue
            first, second = sorted((row, column), key=names.index)
            reason = refusal((first, second))
            if reason is None:
                cells.append("✓")
                continue
            if reason not in reasons:
                reasons.append(reason)
            cells.append(f"({reasons.index(reason) + 1})")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(table())
