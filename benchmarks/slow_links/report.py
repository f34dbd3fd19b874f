"""The results over slow links as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, estimate, table, undisturbed
from benchmarks.slow_links.contenders import NODES, RANKS_EACH, Setting
from benchmarks.train.report import ratios

Piece = dict[str, Any]


def report(pieces: Sequence[Piece]) -> str:
    """All that was measured, without the pieces that have no undisturbed pair yet."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    by_link: dict[str, list[Piece]] = {}
    for piece in measured:
        by_link.setdefault(Setting(**piece["settings"]).link, []).append(piece)
    parts = ["# Over slow links: wanma's ways to sum gradients beside PyTorch's DDP\n", _preface(measured)]
    parts += [_of_link(link, group) for link, group in by_link.items()]
    parts += ["## Commands\n", _commands(measured), "## Where and when\n", describe_environments(measured)]
    return "\n".join(parts)


def _preface(pieces: Sequence[Piece]) -> str:
    models = dict.fromkeys(
        f"`{s['preset']}` with a vocabulary of {s['vocabulary']:,}, sequences of {s['sequence']}, "
        f"{s['batch']} per rank and step, {s['precision']}"
        for s in (piece["settings"] for piece in pieces)
    )
    return (
        f"{NODES} network namespaces of one machine as machines, of {RANKS_EACH} ranks each, one thread a "
        f"rank. Model: {'; '.join(models)}. Ratio: wanma's tokens per second over DDP's in the same round, "
        "median with its 95 % bootstrap interval. Waited: seconds of a step in which rank 0 waited for "
        "gradients.\n"
    )


def _of_link(link: str, pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in pieces:
        pairs, setting = undisturbed(piece), Setting(**piece["settings"])
        speeds = [
            estimate([taken[who]["tokens_per_second"] for taken in pairs]).median for who in ("wanma", "peer")
        ]
        waited = [taken["wanma"]["waited"] for taken in pairs if taken["wanma"].get("waited") is not None]
        dropped = len(piece["pairs"]) - len(pairs)
        rows.append(
            [
                f"{setting.contender}: {setting.way.title}",
                *(f"{speed:,.0f}" for speed in speeds),
                str(estimate(ratios(piece))),
                f"{estimate(waited).median:.2f}" if waited else "–",
                f"{last_loss(piece, 'wanma'):.4f} / {last_loss(piece, 'peer'):.4f}",
                f"{len(pairs)}" + (f" ({dropped} disturbed)" if dropped else ""),
            ]
        )
    header = [
        "wanma's gradients",
        "tokens/s",
        "DDP, tokens/s",
        "ratio (95 %)",
        "waited, s",
        "last loss",
        "pairs",
    ]
    return f"## {link}\n\n{table(header, rows)}"


def last_loss(piece: Piece, who: str) -> float:
    return float(undisturbed(piece)[0][who]["losses"][-1])


def _commands(pieces: Sequence[Piece]) -> str:
    lines: dict[str, None] = {}
    for piece in pieces:
        lines |= dict.fromkeys(piece["commands"].values())
    listed = "".join(f"    {line}\n" for line in lines)
    return f"{listed}\nA `job.toml`:\n\n```toml\n{pieces[0]['job']}```\n"
