"""Report of the comparison over slow links, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import describe_environments, table, undisturbed
from benchmarks.slow_links.contenders import CONTENDERS, NODES, RANKS_EACH, Setting
from wanma.bench.statistics.estimates import estimate

Piece = dict[str, Any]
DDP = "DDP"
"""Name of DDP beside those of `CONTENDERS`."""


def report(pieces: Sequence[Piece]) -> str:
    """Return all results, without the pieces that have no undisturbed pair yet."""
    measured = [piece for piece in pieces if undisturbed(piece)]
    if not measured:
        return "Nothing has been measured yet.\n"
    by_link: dict[str, list[Piece]] = {}
    for piece in measured:
        by_link.setdefault(Setting(**piece["settings"]).link, []).append(piece)
    parts = ["# Gradient all-reduce over slow links beside PyTorch's DDP\n", _preface(measured)]
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
        "gradients. Losses are of the last measured step, of which runs with less frequent synchronization "
        "have more.\n"
    )


def _of_link(link: str, pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in pieces:
        rounds = undisturbed(piece)
        dropped = len(piece["pairs"]) - len(rounds)
        counted = f"{len(rounds)}" + (f" ({dropped} disturbed)" if dropped else "")
        for name in (DDP, *Setting(**piece["settings"]).names):
            taken = [one[name] for one in rounds]
            waited = [sample["waited"] for sample in taken if sample.get("waited") is not None]
            rows.append(
                [
                    f"{name}: {CONTENDERS[name].title}" if name != DDP else "PyTorch's DDP",
                    f"{estimate([sample['tokens_per_second'] for sample in taken]).median:,.0f}",
                    str(estimate(ratios(piece, name))) if name != DDP else "1",
                    f"{estimate(waited).median:.2f}" if waited else "–",
                    f"{taken[0]['losses'][-1]:.4f}",
                    counted,
                ]
            )
    header = ["gradients", "tokens/s", "ratio (95 %)", "waited, s", "last loss", "rounds"]
    return f"## {link}\n\n{table(header, rows)}"


def ratios(piece: Piece, name: str) -> list[float]:
    """Return the tokens per second of `name` over DDP's, for each undisturbed round."""
    return [
        taken[name]["tokens_per_second"] / taken[DDP]["tokens_per_second"] for taken in undisturbed(piece)
    ]


def _commands(pieces: Sequence[Piece]) -> str:
    lines: dict[str, None] = {}
    for piece in pieces:
        lines |= dict.fromkeys(piece["commands"].values())
    listed = "".join(f"    {line}\n" for line in lines)
    ways = "".join(
        f"    # {name}\n" + "".join(f"    {line}\n" for line in CONTENDERS[name].parallel)
        for name in dict.fromkeys(name for piece in pieces for name in Setting(**piece["settings"]).names)
    )
    return (
        f"{listed}\nDDP's `job.toml`:\n\n```toml\n{pieces[0]['job']}```\n\n"
        f"What the others have beside it in `[parallel]`:\n\n{ways}"
    )
