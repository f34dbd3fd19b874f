"""Compared mesh dimensions: wanma's layout, and the recipe that does the same in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

TITAN = "torchtitan 0.2.2: torchtitan"


@dataclass(frozen=True)
class Axis:
    """Comparison of one mesh dimension."""

    title: str
    layout: str
    """Lines of wanma's [parallel] section, which the recipe reads too; RANKS stands for their number."""
    recipe: str | None
    """Script in `recipes/`; None: wanma itself, unsharded, in one process with the same cores."""
    source: str
    """Author of the recipe."""
    splits_samples: bool = False
    """True if ranks read different samples."""
    pipelined: bool = False
    experts: bool = False
    """True if the model is a mixture of experts."""
    context: bool = False
    """True if sequences are long and few."""
    half_precision: bool = True
    """True if the recipe has bf16: torchtitan runs `tp` and `pp` alone in fp32 (`maybe_enable_amp`)."""


AXES: Mapping[str, Axis] = {
    "dp": Axis(
        "replicas",
        "dp_replicate = RANKS",
        "data.py",
        f"{TITAN}/models/llama3/infra/parallelize.py, apply_ddp",
        splits_samples=True,
    ),
    "zero2": Axis(
        "ZeRO-2",
        'dp_shard = RANKS\nshard = "gradients"',
        "data.py",
        f"{TITAN}/models/llama3/infra/parallelize.py, apply_fsdp, reshard_after_forward never",
        splits_samples=True,
    ),
    "zero3": Axis(
        "ZeRO-3",
        'dp_shard = RANKS\nshard = "parameters"',
        "data.py",
        f"{TITAN}/models/llama3/infra/parallelize.py, apply_fsdp",
        splits_samples=True,
    ),
    "tp": Axis(
        "tensor",
        "tp = RANKS\nsequence_parallel = false",
        "tensor.py",
        "torchtitan (main): torchtitan/models/qwen3/parallelize.py, apply_non_moe_tp, enable_sp=False",
        half_precision=False,
    ),
    "tp-sequence": Axis(
        "tensor + sequence",
        "tp = RANKS\nsequence_parallel = true",
        "tensor.py",
        f"{TITAN}/models/llama3/infra/parallelize.py, apply_tp",
        half_precision=False,
    ),
    **{
        f"pp-{name}": Axis(
            f"pipeline, {title}",
            f'pp = RANKS\nschedule = "{schedule}"',
            "pipeline.py",
            f"{TITAN}/distributed/pipeline_parallel.py",
            pipelined=True,
            half_precision=False,
        )
        for name, title, schedule in (
            ("1f1b", "1F1B", "1f1b"),
            ("interleaved", "interleaved 1F1B", "interleaved_1f1b"),
            ("zbv", "ZBV", "zbv"),
        )
    },
    "ep": Axis(
        "experts (with ZeRO-3)",
        'dp_shard = RANKS\nshard = "parameters"\nep = RANKS',
        "expert.py",
        f"{TITAN}/distributed/expert_parallel.py, ExpertParallel; models/moe/moe.py; "
        "models/llama4/infra/parallelize.py, apply_fsdp",
        splits_samples=True,
        experts=True,
    ),
    **{
        f"cp-{name}": Axis(
            f"context, {title}",
            f'cp = RANKS\ncp_method = "{kind}"',
            None,
            "none: torch's context_parallel refuses CPUs",
            context=True,
        )
        for name, title, kind in (("ring", "ring", "ring"), ("all-to-all", "all-to-all", "all_to_all"))
    },
}


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Return the first block of every stage but the first, cut by count, each end weighing one block.

    torchtitan 0.2.2, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part: the remainder goes to
    the first stages.

    Raises:
        ValueError: there are too many stages, as in torchtitan.
    """
    if stages > layers + 2:
        raise ValueError(f"{layers} blocks cannot be cut into {stages} stages")
    each, extra = divmod(layers + 2, stages)
    sizes = [each + (stage < extra) for stage in range(stages)]
    sizes[0] -= 1  # the embedding
    return tuple(accumulate(sizes[:-1]))
