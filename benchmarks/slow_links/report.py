"""Report of the comparison over slow links, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.common import (
    Piece,
    describe_environments,
    ratios,
    rounds_text,
    sample_values,
    table,
    undisturbed,
    verdict,
)
from benchmarks.slow_links.contenders import CONTENDERS, NODES, RANKS_EACH, Setting
from wanma.bench.statistics.estimates import estimate
from wanma.bench.statistics.verdicts import Verdict

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
        "median with its 95 % bootstrap interval. Verdict: that of `wanma bench` on the rounds; all ways "
        "beside one DDP share an error rate of 5 %. Waited: seconds of a step in which rank 0 waited for "
        "gradients. Losses are of the last measured step, of which runs with less frequent synchronization "
        "have more.\n"
    )


def _of_link(link: str, pieces: Sequence[Piece]) -> str:
    rows = []
    for piece in pieces:
        for name in (DDP, *Setting(**piece["settings"]).names):
            taken = [one[name] for one in undisturbed(piece)]
            waited = [sample["waited"] for sample in taken if sample.get("waited") is not None]
            rows.append(
                [
                    f"{name}: {CONTENDERS[name].title}" if name != DDP else "PyTorch's DDP",
                    f"{estimate(sample_values(piece, name)).median:,.0f}",
                    str(estimate(ratios(piece, name, DDP))) if name != DDP else "1",
                    beside_ddp(piece, name).outcome if name != DDP else "–",
                    f"{estimate(waited).median:.2f}" if waited else "–",
                    f"{taken[0]['losses'][-1]:.4f}",
                    rounds_text(piece),
                ]
            )
    header = ["gradients", "tokens/s", "ratio (95 %)", "verdict", "waited, s", "last loss", "rounds"]
    return f"## {link}\n\n{table(header, rows)}"


def beside_ddp(piece: Piece, name: str) -> Verdict:
    """Return the verdict on one of the contenders that are compared with DDP."""
    return verdict(piece, name, DDP, comparisons=len(Setting(**piece["settings"]).names))


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
