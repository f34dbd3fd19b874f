"""Report, as Markdown, of a recorded comparison of trainings; the suites `*-peers` have taken its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, ratios, rounds_text, sample_values, table, undisturbed
from wanma.bench.statistics.estimates import estimate

TITLES = {
    "a": "Table a: each peer as its documentation's quick start has it",
    "b": "Table b: each peer with every public switch that wanma uses",
}
PEERS = {
    "ddp": "PyTorch DDP",
    "fsdp2": "PyTorch FSDP2",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric (DDP)",
    "deepspeed": "DeepSpeed ZeRO-1",
    "one-process": "wanma, one process with all cores",
}
LOSS_LIMITS = {"fp32": 1e-3, "bf16": 5e-2}
"""Maximum relative difference of a step's loss that still counts as the same training."""

Piece = dict[str, Any]


def report(pieces: Sequence[Piece]) -> str:
    """Return all results, without the pieces that have no undisturbed pair yet."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    parts = ["# Training: wanma beside its peers\n", _preface(measured)]
    for name, title in TITLES.items():
        of_table = [
            p for p in measured if p["settings"]["table"] == name and p["settings"]["peer"] != "one-process"
        ]
        parts += [_ratios(title, group) for group in _groups(of_table)]
    alone = [p for p in measured if p["settings"]["peer"] == "one-process"]
    parts += [_ratios("Ranks or threads: the same cores as one process", group) for group in _groups(alone)]
    parts += [_losses(group) for group in _groups([p for p in measured if p["settings"]["table"] == "a"])]
    parts += ["## Commands\n", _commands(measured), "## Where and when\n", describe_environments(measured)]
    return "\n".join(parts)


def loss_difference(piece: Piece) -> float:
    """Return the largest relative difference between the contenders' losses, over all steps and pairs."""
    return max(
        abs(float(ours) - float(theirs)) / abs(float(theirs))
        for taken in piece["pairs"]
        for ours, theirs in zip(taken["wanma"]["losses"], taken["peer"]["losses"], strict=True)
    )


def _preface(pieces: Sequence[Piece]) -> str:
    models = dict.fromkeys(
        f"`{s['preset']}` with a vocabulary of {s['vocabulary']:,} and sequences of {s['sequence']}"
        for s in (piece["settings"] for piece in pieces)
    )
    return (
        "Recorded in 2026-11 by scripts of this repository that are now the suites `ddp-peers` and "
        "`sharded-peers` of `wanma bench train`.\n\n"
        f"Model: {'; '.join(models)}. Ratio: wanma's tokens per second over the peer's, median of the pairs "
        "with its 95 % bootstrap interval. Tokens per second: medians. Loss difference: the largest relative "
        "one of any step.\n"
    )


def _groups(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces that share a table: all settings equal but the peer."""
    groups: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        key = tuple(value for name, value in piece["settings"].items() if name != "peer")
        groups.setdefault(key, []).append(piece)
    return list(groups.values())


def _ratios(title: str, pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in sorted(pieces, key=lambda piece: list(PEERS).index(piece["settings"]["peer"])):
        speeds = [estimate(sample_values(piece, who)).median for who in ("wanma", "peer")]
        rows.append(
            [
                PEERS[piece["settings"]["peer"]],
                *(f"{speed:,.0f}" for speed in speeds),
                str(estimate(ratios(piece))),
                rounds_text(piece),
                _stated_difference(piece),
            ]
        )
    header = ["peer", "wanma, tokens/s", "peer, tokens/s", "ratio (95 %)", "pairs", "loss difference"]
    return f"## {title}\n\n{_describe(pieces[0])}\n\n{table(header, rows)}"


def _stated_difference(piece: Piece) -> str:
    difference = loss_difference(piece)
    limit = LOSS_LIMITS[piece["settings"]["precision"]]
    return f"{difference:.1e}" + ("" if difference <= limit else " NOT THE SAME TRAINING")


def _describe(piece: Piece) -> str:
    setting = piece["settings"]
    compiled = "compiled" if setting["compile"] else "not compiled"
    sequences = "sequence" if setting["batch"] == 1 else "sequences"
    return (
        f"{setting['precision']}, {compiled}, {setting['ranks']} ranks, "
        f"{setting['batch']} {sequences} per rank and step; "
        f"{setting['steps']} steps measured after {setting['warmup']}."
    )


def _losses(pieces: Sequence[Piece]) -> str:
    """Return the losses of the first pair, side by side."""
    count = len(pieces[0]["pairs"][0]["wanma"]["losses"])
    shown = sorted({round(index * (count - 1) / 5) for index in range(6)})
    rows = []
    for piece in pieces:
        title = PEERS[piece["settings"]["peer"]]
        for name, who in ((f"wanma, beside {title}", "wanma"), (title, "peer")):
            losses = piece["pairs"][0][who]["losses"]
            rows.append([name, *(f"{losses[step]:.5f}" for step in shown)])
    header = ["loss at step", *(str(step + 1) for step in shown)]
    return f"## Losses\n\n{_describe(pieces[0])}\n\n{table(header, rows)}"


def _commands(pieces: Sequence[Piece]) -> str:
    lines: dict[str, None] = {}
    for piece in pieces:
        lines |= dict.fromkeys(piece["commands"].values())
    jobs = dict.fromkeys(piece["job"] for piece in pieces[:1])
    listed = "".join(f"    {line}\n" for line in lines)
    return listed + "".join(f"\nA `job.toml`:\n\n```toml\n{job}```\n" for job in jobs)
