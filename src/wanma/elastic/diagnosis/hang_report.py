"""Hang report: status of all ranks as text, with the outlier first; pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from wanma.elastic.failure import Failure, clip
from wanma.elastic.protocol.messages import Hung, Standing

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_INNER_MODULES = (
    *("/torch/", "/numpy/", "/fsspec/", "/asyncio/", "/concurrent/futures/"),
    *("/threading.py", "/selectors.py", "/socket.py", "/ssl.py", "/queue.py"),
)
_DOING = {"waiting for data": "data loading"}
"""Activity of a rank in words, for phases with another name."""
REPORT_LIMIT = 256 * 1024
"""Most characters of a hang report in a message."""
_NAMED = 3
"""Most outlier groups named in the first line."""


def hang_report(standings: Sequence[Standing], seconds: float, limit: str) -> tuple[str, str]:
    """Format the hang of ranks of which none has reported for `seconds`: (summary of a few lines, report).

    Ranks with the same stack, phase and collective form a group. The smallest groups come first: in a hang
    most ranks wait in a collective for the one that does not come.
    """
    groups = sorted(_groups(standings), key=lambda group: (len(group), bool(group[0].collective)))
    several = len({standing.node for standing in standings}) > 1
    odd = [group for group in groups if _is_odd(group, groups[-1])]
    lines = [f"no rank has moved for {seconds:.0f} s ({limit}){_sentence(odd, groups)}"]
    lines += [f"  {_describe(group, group in odd, several)}" for group in groups]
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
                f"collective: {one.collective or 'none'}{_before(one)}"
            )
        details.append("")
    return summary, "\n".join(details)


def main_thread_stack(dump: str, main_thread: int) -> tuple[str, ...]:
    """Return the frames of one thread in faulthandler's `dump` of all threads, innermost first.

    A frame is 'file:line in function'. If that thread waits for one that loads data, the frames of the latter
    come first, as if it had called it: the hang is in the thread that loads.

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
    ours = (
        depth for depth, frame in enumerate(found) if "/wanma/elastic/workers/worker_process.py:" in frame
    )
    return (*_loading(found, stacks), *(found[: next(ours, len(found))] or found))


def _loading(found: Sequence[str], stacks: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Return the frames of a data-loading thread for which `found` waits; of several threads, any."""
    if not any(_is_loader(frame, "__next__") for frame in found):
        return ()
    for stack in stacks.values():
        depth = next((depth for depth, frame in enumerate(stack) if _is_loader(frame, "load")), None)
        if depth is not None:
            return tuple(stack[: depth + 1])
    return ()


def _is_loader(frame: str, function: str) -> bool:
    return "/wanma/data/step_loader.py:" in frame and frame.endswith(f" in {function}")


def _groups(standings: Sequence[Standing]) -> list[list[Standing]]:
    groups: defaultdict[object, list[Standing]] = defaultdict(list)
    for standing in sorted(standings, key=lambda one: one.rank):
        groups[standing.stack, standing.phase, standing.collective, standing.state].append(standing)
    return list(groups.values())


def _is_odd(group: list[Standing], most: list[Standing]) -> bool:
    """Return True for a group smaller than the largest, or outside of that one's collective."""
    mine, theirs = group[0].collective, most[0].collective
    if mine and mine == theirs:
        return False
    return len(group) < len(most) or (bool(theirs) and not mine)


def _sentence(odd: list[list[Standing]], groups: list[list[Standing]]) -> str:
    """Format outliers: ': rank 5 is in data loading (dataset.py:81) while 7 others wait in all_reduce'."""
    if not odd:
        return ""
    told = [_briefly(group) for group in odd[:_NAMED]]
    told += [f"{len(odd) - _NAMED} more are elsewhere"] * (len(odd) > _NAMED)
    count = sum(len(group) for group in groups if group not in odd)
    others = f"{count} other{'s' if count > 1 else ''}"
    first = groups[-1][0]
    if first.collective:
        what = f"wait{'' if count > 1 else 's'} in {first.collective}"
    else:
        what = f"{'are' if count > 1 else 'is'} in {_doing(first)}"
    return f": {', '.join(told)} while {others} {what}"


def _briefly(group: list[Standing]) -> str:
    first, several = group[0], len(group) > 1
    if first.state:
        what = f"{'are' if several else 'is'} {first.state}"
    elif first.collective:
        what = f"wait{'' if several else 's'} in {first.collective}"
    else:
        what = f"{'are' if several else 'is'} in {_doing(first)}"
        if first.stack:
            what += f" ({_place(first.stack).partition(' in ')[0].rpartition('/')[2]})"
    return f"{_ranks(group)} {what}"


def _doing(one: Standing) -> str:
    return _DOING.get(one.phase, one.phase) or "its start"


def _before(one: Standing) -> str:
    return f", before that: {', '.join(one.recent)}" if one.recent else ""


def _describe(group: list[Standing], odd: bool, several: bool) -> str:
    """Describe a group in one line; name its nodes if the ranks are on `several`."""
    first = group[0]
    silence = max(one.silent_seconds for one in group)
    be = "is" if len(group) == 1 else "are"
    where = f"{be} in {_doing(first)}" if first.phase else f"{be} before the first report"
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
    """Return the innermost frame of the user's code: not inside torch or a waiting primitive."""
    for frame in stack:
        if not any(inner in frame for inner in _INNER_MODULES) and not frame.startswith("<frozen"):
            return frame
    return stack[0]


def _ranks(group: list[Standing]) -> str:
    """Format ranks: 'rank 3', 'ranks 0-2, 5'."""
    return f"rank{'s' if len(group) > 1 else ''} {_joined([one.rank for one in group])}"


def _nodes(group: list[Standing]) -> str:
    """Format nodes: ' (node 1, HOST)', ' (nodes 0-2, 5)'."""
    hosts = {one.node: one.host for one in group}
    if len(hosts) == 1:
        return "".join(f" (node {node}, {host})" for node, host in hosts.items())
    return f" (nodes {_joined(sorted(hosts))})"


def _joined(numbers: list[int]) -> str:
    """Format numbers as ranges, readable for thousands of ranks: '0-2, 5' for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class Inquiry:
    """Collection of the status of all nodes' ranks in a hang."""

    def __init__(self, hang: Hung) -> None:
        self._hang = hang
        self._standings: dict[int, tuple[Standing, ...]] = {}

    def hear(self, node: int, standings: tuple[Standing, ...]) -> int:
        """Add the status of a node's ranks, and return the number of nodes that have answered."""
        self._standings[node] = standings
        return len(self._standings)

    def conclusion(self) -> tuple[Failure, str]:
        """Return the failure, and its report, from the status collected so far."""
        standings = [one for node in self._standings.values() for one in node]
        summary, report = hang_report(standings, self._hang.seconds, self._hang.limit)
        hint = "the stacks are in logs/hang-report.txt of the run directory"
        return Failure(clip(summary), hint=hint), clip(report, REPORT_LIMIT)
