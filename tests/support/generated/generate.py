"""Selection of cases: every feature alone under every layout, and seeded combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import fields, replace

from support.generated.case import LAYOUTS, OUTPUTS, Case
from support.generated.features import BLOCKS, FEATURES, ROOT
from support.generated.losses import LOSSES
from support.generated.optimizers import BUILT_IN, OPTIMIZERS

WAYS = [
    ("whole batch", "train", "gloo"),
    ("micro-batches", "train", "gloo"),
    ("micro-batches", "session", "gloo"),
    ("recomputing", "train", "gloo"),
    ("replicas", "train", "gloo"),
    ("replicas", "session", "shared_memory"),
    ("ZeRO 1", "train", "shared_memory"),
    ("ZeRO 1", "session", "gloo"),
    ("ZeRO 2", "train", "gloo"),
    ("ZeRO 2", "session", "shared_memory"),
    ("ZeRO 3", "train", "shared_memory"),
    ("ZeRO 3", "train", "gloo"),
    ("ZeRO 3", "session", "shared_memory"),
    ("ZeRO 3", "session", "gloo"),
    ("replicas, at once", "train", "shared_memory"),
    ("ZeRO 3, at once", "session", "gloo"),
    ("pipeline", "train", "shared_memory"),
    ("pipeline", "train", "gloo"),
    ("gpipe, recomputing", "train", "gloo"),
    ("pipeline, one by one", "train", "shared_memory"),
    ("replicas, one by one", "session", "gloo"),
]
"""Layout, entry and collectives of the cases that have one feature only."""

FP32 = {("replicas", "shared_memory"), ("ZeRO 1", "gloo"), ("ZeRO 3", "shared_memory"), ("pipeline", "gloo")}
"""Layouts and collectives of those that compute in fp32."""


def single_features() -> Iterator[Case]:
    """Each feature, loss, output and optimizer by itself, in each of `WAYS`."""
    for layout, entry, collectives in WAYS:
        case = Case(layout=layout, entry=entry, collectives=collectives, global_batch=8)  # type: ignore[arg-type]
        piped = "pp" in LAYOUTS[layout]
        # Some of the ways in the precision that most jobs have.
        case = replace(case, precision="fp32" if (layout, collectives) in FP32 else "fp64")
        for name in FEATURES:
            if name in ROOT and piped:
                continue
            loss = "default" if piped else "squares"
            yield replace(case, features=(name,), loss=loss, is_sequential=piped)
        for name, loss in LOSSES.items():
            if not piped or (loss.default and not loss.end):
                yield replace(case, features=("linear",), loss=name, is_sequential=piped, validates=not piped)
        for name in OPTIMIZERS:
            if name != BUILT_IN:
                loss = "default" if piped else "squares"
                yield replace(
                    case, features=("linear",), optimizer=name, loss=loss, is_sequential=piped, steps=17
                )
        if not piped:
            for output in OUTPUTS:
                yield replace(case, features=("linear",), output=output, validates=True)
                yield replace(case, features=("linear",), output=output, loss="default", validates=True)


def combinations(seed: int, count: int) -> Iterator[Case]:
    """Cases drawn at random, the same ones for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        yield _combination(draw)


def _combination(draw: random.Random) -> Case:
    layout = draw.choices(list(LAYOUTS), [1, 2, 2, 3, 2, 2, 4, 2, 1, 1, 2, 1, 1, 1, 1, 1])[0]
    piped = "pp" in LAYOUTS[layout]
    blocks = draw.choices(list(BLOCKS), k=draw.choice([1, 2, 2, 3, 4]))
    if draw.random() < 0.4:
        blocks += [draw.choice(blocks)]
    others = [name for name in FEATURES if name not in BLOCKS and not (piped and name in ROOT)]
    features = (*blocks, *draw.sample(others, draw.choice([0, 1, 1, 2, 3])))
    losses = [name for name, loss in LOSSES.items() if not piped or (loss.default and not loss.end)]
    grouped = any(FEATURES[name].layers for name in features)
    is_sequential = piped or (draw.random() < 0.1 and not any(name in ROOT for name in features))
    losses = [name for name in losses if not (is_sequential and LOSSES[name].end)]
    entry = "train" if piped else draw.choice(["train", "session"])
    return Case(
        features,
        loss=draw.choice(losses) if draw.random() < 0.5 else ("default" if piped else "squares"),
        layout=layout,
        entry=entry,  # type: ignore[arg-type]
        collectives=draw.choice(["gloo", "shared_memory"]),
        output="tensor" if is_sequential else draw.choice(["tensor", "tensor", *OUTPUTS]),
        precision=draw.choice(["fp64", "fp32"]),
        is_sequential=is_sequential,
        global_batch=8 if grouped else draw.choice([8, 7, 5]),
        validates=draw.random() < 0.3,
        weight_decay=draw.choice([0.0, 0.1]),
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases that have one thing less."""
    for index in range(len(case.features)):
        yield replace(case, features=case.features[:index] + case.features[index + 1 :])
    plainest = replace(Case(), layout=case.layout, is_sequential=case.is_sequential)
    if case.is_sequential and "pp" in LAYOUTS[case.layout]:
        plainest = replace(plainest, loss="default")
    elif case.is_sequential:
        yield replace(case, is_sequential=False)
    for field in fields(Case):
        if field.name in ("features", "layout", "is_sequential"):
            continue
        if getattr(case, field.name) != getattr(plainest, field.name):
            yield replace(case, **{field.name: getattr(plainest, field.name)})
    for layout in itertools.takewhile(lambda name: name != case.layout, LAYOUTS):
        if ("pp" in LAYOUTS[layout]) <= case.is_sequential:
            yield replace(case, layout=layout)
    if case.steps > 1:
        yield replace(case, steps=case.steps - 1)
