"""Hang report: status of all ranks as text, with the outlier first; pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from wanma.elastic.failure import Failure, truncate_middle
from wanma.elastic.protocol.messages import HangAlarm, RankStatus

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_INNER_MODULES = (
    *("/torch/", "/numpy/", "/fsspec/", "/asyncio/", "/concurrent/futures/"),
    *("/threading.py", "/selectors.py", "/socket.py", "/ssl.py", "/queue.py"),
)
_ACTIVITY_BY_PHASE = {"waiting for data": "data loading"}
"""Activity of a rank in words, for phases with another name."""
MAX_REPORT_CHARACTERS = 256 * 1024
"""Most characters of a hang report in a message."""
_MAX_NAMED_OUTLIERS = 3
"""Most outlier groups named in the first line."""


def format_hang_report(
    statuses: Sequence[RankStatus], silent_seconds: float, timeout_setting: str
) -> tuple[str, str]:
    """Format the hang of ranks, none of which reported for `silent_seconds`: (summary of some lines, report).

    Ranks with the same stack, phase and collective form a group. The smallest groups come first: in a hang
    most ranks wait in a collective for the one that does not come.
    """
    groups = sorted(_groups(statuses), key=lambda group: (len(group), bool(group[0].current_collective)))
    several = len({standing.node_rank for standing in statuses}) > 1
    outliers = [group for group in groups if _is_outlier(group, groups[-1])]
    lines = [
        f"no rank reported progress for {silent_seconds:.0f} s ({timeout_setting})"
        f"{_outlier_sentence(outliers, groups)}"
    ]
    lines += [f"  {_describe(group, group in outliers, several)}" for group in groups]
    summary = "\n".join(lines)
    details = [summary, ""]
    for group in groups:
        details.append(f"stack of {_ranks(group)} (innermost frame first):")
        details += [f"    {frame}" for frame in group[0].stack] or [
            "    no stack: the process did not respond"
        ]
        for status in group:
            step = "no step yet" if status.step is None else f"step {status.step}"
            details.append(
                f"  rank {status.rank}: node {status.node_rank} ({status.hostname}), {step}, "
                f"{status.phase or 'no phase'}, "
                f"silent for {status.silent_seconds:.1f} s, {status.process_state or 'process alive'}, "
                f"collective: {status.current_collective or 'none'}{_recent_collectives(status)}"
            )
        details.append("")
    return summary, "\n".join(details)


def parse_stack_dump(dump: str, main_thread: int) -> tuple[str, ...]:
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
    main_frames = stacks.get(main_thread, stacks.get(current, []))
    # Below the entry function are only the supervisor's own frames, the same in every rank.
    own_depths = (
        depth
        for depth, frame in enumerate(main_frames)
        if "/wanma/elastic/workers/worker_process.py:" in frame
    )
    return (
        *_data_loader_frames(main_frames, stacks),
        *(main_frames[: next(own_depths, len(main_frames))] or main_frames),
    )


def _data_loader_frames(main_stack: Sequence[str], stacks: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """Return the frames of a data-loading thread for which `main_stack` waits; of several threads, any."""
    if not any(_is_loader(frame, "__next__") for frame in main_stack):
        return ()
    for stack in stacks.values():
        depth = next((depth for depth, frame in enumerate(stack) if _is_loader(frame, "load")), None)
        if depth is not None:
            return tuple(stack[: depth + 1])
    return ()


def _is_loader(frame: str, function: str) -> bool:
    return "/wanma/data/step_loader.py:" in frame and frame.endswith(f" in {function}")


def _groups(statuses: Sequence[RankStatus]) -> list[list[RankStatus]]:
    groups: defaultdict[object, list[RankStatus]] = defaultdict(list)
    for standing in sorted(statuses, key=lambda status: status.rank):
        groups[standing.stack, standing.phase, standing.current_collective, standing.process_state].append(
            standing
        )
    return list(groups.values())


def _is_outlier(group: list[RankStatus], largest: list[RankStatus]) -> bool:
    """Return True for a group smaller than the largest, or outside of that one's collective."""
    collective, majority_collective = group[0].current_collective, largest[0].current_collective
    if collective and collective == majority_collective:
        return False
    return len(group) < len(largest) or (bool(majority_collective) and not collective)


def _outlier_sentence(outliers: list[list[RankStatus]], groups: list[list[RankStatus]]) -> str:
    """Format outliers: ': rank 5 is in data loading (data.py:81) while 7 other ranks wait in all_reduce'."""
    if not outliers:
        return ""
    descriptions = [_short_description(group) for group in outliers[:_MAX_NAMED_OUTLIERS]]
    descriptions += [f"{len(outliers) - _MAX_NAMED_OUTLIERS} more groups of ranks are elsewhere"] * (
        len(outliers) > _MAX_NAMED_OUTLIERS
    )
    count = sum(len(group) for group in groups if group not in outliers)
    peers = f"{count} other rank{'s' if count > 1 else ''}"
    first = groups[-1][0]
    if first.current_collective:
        activity = f"wait{'' if count > 1 else 's'} in {first.current_collective}"
    else:
        activity = f"{'are' if count > 1 else 'is'} in {_activity(first)}"
    return f": {', '.join(descriptions)} while {peers} {activity}"


def _short_description(group: list[RankStatus]) -> str:
    first, several = group[0], len(group) > 1
    if first.process_state:
        activity = f"{'are' if several else 'is'} {first.process_state}"
    elif first.current_collective:
        activity = f"wait{'' if several else 's'} in {first.current_collective}"
    else:
        activity = f"{'are' if several else 'is'} in {_activity(first)}"
        if first.stack:
            activity += f" ({_user_frame(first.stack).partition(' in ')[0].rpartition('/')[2]})"
    return f"{_ranks(group)} {activity}"


def _activity(status: RankStatus) -> str:
    return _ACTIVITY_BY_PHASE.get(status.phase, status.phase) or "its start"


def _recent_collectives(status: RankStatus) -> str:
    return f", before that: {', '.join(status.recent_collectives)}" if status.recent_collectives else ""


def _describe(group: list[RankStatus], is_outlier: bool, names_nodes: bool) -> str:
    """Describe a group in one line; name its nodes if the ranks are on `names_nodes`."""
    first = group[0]
    silence = max(status.silent_seconds for status in group)
    verb = "has" if len(group) == 1 else "have"
    state = f"{verb} been in {_activity(first)}" if first.phase else f"{verb} sent no report"
    if first.step is not None:
        state += f" of step {first.step}"
    text = f"{_ranks(group)}{_nodes(group) if names_nodes else ''} {state} for {silence:.0f} s"
    if first.process_state:
        text += f", the process is {first.process_state}"
    if first.current_collective:
        text += f", {'waits' if len(group) == 1 else 'wait'} in {first.current_collective}"
    if first.stack:
        text += f" ({_user_frame(first.stack)})"
    elif not first.process_state:
        text += " (no stack: the process did not respond)"
    return f"{text}   <- outlier" if is_outlier else text


def _user_frame(stack: tuple[str, ...]) -> str:
    """Return the innermost frame of the user's code: not inside torch or a waiting primitive."""
    for frame in stack:
        if not any(inner in frame for inner in _INNER_MODULES) and not frame.startswith("<frozen"):
            return frame
    return stack[0]


def _ranks(group: list[RankStatus]) -> str:
    """Format ranks: 'rank 3', 'ranks 0-2, 5'."""
    return f"rank{'s' if len(group) > 1 else ''} {_format_ranges([status.rank for status in group])}"


def _nodes(group: list[RankStatus]) -> str:
    """Format nodes: ' (node 1, HOST)', ' (nodes 0-2, 5)'."""
    hosts = {status.node_rank: status.hostname for status in group}
    if len(hosts) == 1:
        return "".join(f" (node {node}, {host})" for node, host in hosts.items())
    return f" (nodes {_format_ranges(sorted(hosts))})"


def _format_ranges(numbers: list[int]) -> str:
    """Format numbers as ranges, readable for thousands of ranks: '0-2, 5' for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


class HangReportCollector:
    """Collection of the status of all nodes' ranks in a hang."""

    def __init__(self, alarm: HangAlarm) -> None:
        self._alarm = alarm
        self._statuses_by_member: dict[int, tuple[RankStatus, ...]] = {}

    def add(self, member_id: int, statuses: tuple[RankStatus, ...]) -> int:
        """Add the status of a node's ranks, and return the number of nodes that have answered."""
        self._statuses_by_member[member_id] = statuses
        return len(self._statuses_by_member)

    def make_report(self) -> tuple[Failure, str]:
        """Return the failure, and its report, from the status collected so far."""
        standings = [status for node in self._statuses_by_member.values() for status in node]
        summary, report = format_hang_report(
            standings, self._alarm.silent_seconds, self._alarm.timeout_setting
        )
        hint = "read the stacks in logs/hang-report.txt of the run directory"
        return Failure(truncate_middle(summary), hint=hint), truncate_middle(report, MAX_REPORT_CHARACTERS)
