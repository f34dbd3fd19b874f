"""The hang report: who stands where, who is the odd one out. Pure: standings in, text out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from wanma.elastic.messages import Standing

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_INNER_MODULES = ("/torch/", "/threading.py", "/selectors.py", "/socket.py", "/queue.py", "/numpy/")


def hang_report(standings: Sequence[Standing], seconds: float, limit: str) -> tuple[str, str]:
    """(summary of a few lines, whole report) of ranks of which none has moved for `seconds`.

    Ranks that stand in the same place form a group. The smallest groups come first: in a hang most
    ranks wait in a collective for the one that does not come.
    """
    groups = sorted(_groups(standings), key=lambda group: (len(group), bool(group[0].collective)))
    several = len({standing.node for standing in standings}) > 1
    lines = [f"no rank has moved for {seconds:.0f} s ({limit})"]
    lines += [f"  {_describe(group, _is_odd(group, groups[-1]), several)}" for group in groups]
    summary = "\n".join(lines)
    details = [summary, ""]
    for group in groups:
        details.append(f"{_ranks(group)} stand{'s' if len(group) == 1 else ''} here (innermost first):")
        details += [f"    {frame}" for frame in group[0].stack] or [
            "    no stack: the process did not answer"
        ]
        for one in group:
            step = "no step yet" if one.step is None else f"step {one.step}"
            details.append(
                f"  rank {one.rank}: node {one.node} ({one.host}), {step}, {one.phase or 'no phase'}, "
                f"silent for {one.silent_seconds:.1f} s, {one.state or 'process alive'}, "
                f"collective: {one.collective or 'none'}"
            )
        details.append("")
    return summary, "\n".join(details)


def main_thread_stack(dump: str, main_thread: int) -> tuple[str, ...]:
    """The frames of one thread in faulthandler's `dump` of all, innermost first, as 'file:line in function'.

    Args:
        dump: the text; of several dumps the last counts.
        main_thread: identity of the wanted thread; 0: the one that answered the signal.
    """
    stacks: dict[int, list[str]] = {}
    current = 0
    frames: list[str] = []
    for line in dump.splitlines():
        if match := _THREAD.match(line):
            identity = int(match[1], 16)
            if line.startswith("Current"):
                current = identity
            frames = stacks[identity] = []
        elif match := _FRAME.match(line):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    found = stacks.get(main_thread, stacks.get(current, []))
    # Below the entry function are only the supervisor's own frames, the same in every rank.
    ours = (depth for depth, frame in enumerate(found) if "/wanma/elastic/worker_main.py:" in frame)
    return tuple(found[: next(ours, len(found))] or found)


def _groups(standings: Sequence[Standing]) -> list[list[Standing]]:
    groups: defaultdict[object, list[Standing]] = defaultdict(list)
    for standing in sorted(standings, key=lambda one: one.rank):
        groups[standing.stack, standing.phase, standing.collective, standing.state].append(standing)
    return list(groups.values())


def _is_odd(group: list[Standing], most: list[Standing]) -> bool:
    """Fewer than the largest group; among equals, not in the collective in which the others wait."""
    if len(group) == len(most):
        return bool(most[0].collective) and not group[0].collective
    return len(group) < len(most)


def _describe(group: list[Standing], odd: bool, several: bool) -> str:
    """One line; names the nodes where there are `several`."""
    first = group[0]
    silence = max(one.silent_seconds for one in group)
    be = "is" if len(group) == 1 else "are"
    where = f"{be} in {first.phase}" if first.phase else f"{be} before the first report"
    if first.step is not None:
        where += f" of step {first.step}"
    text = f"{_ranks(group)}{_nodes(group) if several else ''} {where} since {silence:.0f} s"
    if first.state:
        text += f", the process is {first.state}"
    if first.collective:
        text += f", {'waits' if len(group) == 1 else 'wait'} in {first.collective}"
    if first.stack:
        text += f" ({_place(first.stack)})"
    elif not first.state:
        text += " (its Python did not answer)"
    return f"{text}   <- the odd one out" if odd else text


def _place(stack: tuple[str, ...]) -> str:
    """The innermost frame that is the user's business: not inside torch or a waiting primitive."""
    for frame in stack:
        if not any(inner in frame for inner in _INNER_MODULES) and not frame.startswith("<frozen"):
            return frame
    return stack[0]


def _ranks(group: list[Standing]) -> str:
    """'rank 3', 'ranks 0-2, 5'."""
    return f"rank{'s' if len(group) > 1 else ''} {_joined([one.rank for one in group])}"


def _nodes(group: list[Standing]) -> str:
    """' (node 1, HOST)', ' (nodes 0-2, 5)'."""
    hosts = {one.node: one.host for one in group}
    if len(hosts) == 1:
        return "".join(f" (node {node}, {host})" for node, host in hosts.items())
    return f" (nodes {_joined(sorted(hosts))})"


def _joined(numbers: list[int]) -> str:
    """'0-2, 5' for 0, 1, 2, 5: runs are joined, so that thousands of ranks stay readable."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
