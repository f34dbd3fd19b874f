"""Models and layouts that are forecast and run on this node's processors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TAUGHT, CHECKED = "taught", "checked"


@dataclass(frozen=True)
class Model:
    """Decoder and its batch."""

    role: str
    """Role of the model; `TAUGHT`: corrects the calibration; `CHECKED`: is forecast with it, and was not seen
    before."""
    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    batch: int
    """Sequences per step."""


MODELS: Mapping[str, Model] = {
    "taught-a": Model(TAUGHT, 6, 384, 6, 1024, 1024, 128, 16),
    "taught-b": Model(TAUGHT, 4, 320, 4, 896, 8192, 256, 8),
    "plain": Model(CHECKED, 6, 256, 4, 704, 4096, 256, 16),
    "wide": Model(CHECKED, 4, 512, 8, 1408, 320, 128, 16),
    "deep": Model(CHECKED, 8, 192, 4, 512, 16384, 512, 8),
}

# Lines of [parallel], by what they do. MB stands for a micro-batch of that share of the batch.
LAYOUTS: Mapping[str, str] = {
    "1 rank": "micro_batch = {all}",
    "1 rank, micro-batches of 1": "micro_batch = 1",
    "1 rank, full recompute": 'micro_batch = {all}\nrecompute = "full"',
    "2 replicas": "dp_replicate = 2\nmicro_batch = {half}",
    "2 replicas, micro-batches of 1, full recompute": (
        'dp_replicate = 2\nmicro_batch = 1\nrecompute = "full"'
    ),
    "2 ZeRO-1": 'dp_shard = 2\nshard = "optimizer"\nmicro_batch = {half}',
    "2 ZeRO-2, micro-batches of 2": 'dp_shard = 2\nshard = "gradients"\nmicro_batch = 2',
    "2 ZeRO-3": 'dp_shard = 2\nshard = "parameters"\nmicro_batch = {half}',
    "2 ZeRO-3, micro-batches of 1": 'dp_shard = 2\nshard = "parameters"\nmicro_batch = 1',
    "2 tensor": "tp = 2\nmicro_batch = {all}",
    "2 tensor, micro-batches of 1": "tp = 2\nmicro_batch = 1",
    "2 tensor, micro-batches of 1, full recompute": 'tp = 2\nmicro_batch = 1\nrecompute = "full"',
    "2 stages": "pp = 2\nmicro_batch = 2",
    "4 replicas": "dp_replicate = 4\nmicro_batch = {quarter}",
    "4 ZeRO-3, micro-batches of 1": 'dp_shard = 4\nshard = "parameters"\nmicro_batch = 1',
    "2 replicas × 2 tensor": "dp_replicate = 2\ntp = 2\nmicro_batch = {half}",
    "2 stages × 2 replicas": "pp = 2\ndp_replicate = 2\nmicro_batch = 1",
    "4 stages": "pp = 4\nmicro_batch = 1",
}

_TAUGHT = ("1 rank", "2 replicas", "2 ZeRO-3", "2 tensor", "2 stages", "4 replicas", "2 replicas × 2 tensor")
_CHECKED = {
    "plain": (
        "1 rank",
        "1 rank, micro-batches of 1",
        "1 rank, full recompute",
        "2 replicas",
        "2 ZeRO-1",
        "2 ZeRO-3",
        "2 tensor",
        "2 tensor, micro-batches of 1",
        "2 tensor, micro-batches of 1, full recompute",
        "2 stages",
        "4 replicas",
        "4 ZeRO-3, micro-batches of 1",
    ),
    "wide": (
        "1 rank",
        "2 replicas",
        "2 ZeRO-2, micro-batches of 2",
        "2 ZeRO-3, micro-batches of 1",
        "2 tensor",
        "2 stages",
        "2 replicas × 2 tensor",
        "4 stages",
        "4 ZeRO-3, micro-batches of 1",
    ),
    "deep": (
        "1 rank",
        "1 rank, full recompute",
        "2 replicas, micro-batches of 1, full recompute",
        "2 ZeRO-1",
        "2 ZeRO-3",
        "2 tensor",
        "2 stages",
        "2 stages × 2 replicas",
        "4 ZeRO-3, micro-batches of 1",
    ),
}


def cases() -> list[tuple[str, str]]:
    """Return (model, layout) of every run, those that correct the calibration first."""
    found = []
    for name, model in MODELS.items():
        layouts = _TAUGHT if model.role == TAUGHT else _CHECKED[name]
        found += [(name, layout) for layout in layouts]
    return found


def job_text(name: str, layout: str, steps: int) -> str:
    """Return the job file of one run."""
    model = MODELS[name]
    sizes = {"all": model.batch, "half": model.batch // 2, "quarter": model.batch // 4}
    return f"""\
[model]
family = "decoder"
layers = {model.layers}
hidden = {model.hidden}
heads = {model.heads}
feed_forward = {model.feed_forward}
vocabulary = {model.vocabulary}

[data]
text = ["stdlib"]
sequence_length = {model.sequence}
validation_fraction = 0.0

[train]
steps = {steps}
global_batch = {model.batch}
schedule = "constant"

[parallel]
{LAYOUTS[layout].format(**sizes)}

[cluster]
device = "cpu"

[checkpoint]
every_steps = 0
keep = 1
keep_best = false
"""
