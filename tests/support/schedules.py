"""torch's pipeline schedules as lists of actions, without processes, and what would become of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from wanma.job.plan.plan import Plan

Orders = dict[int, list[Any]]
"""By rank: torch's actions in order."""


def fake_stages(plan: Plan) -> list[Any]:
    """Return stages of rank 0, with what a schedule reads of them before it runs."""
    return [
        SimpleNamespace(
            stage_index=number, num_stages=plan.stage_count, group_size=plan.pp, group_rank=0, submod=None
        )
        for number in plan.stages_of_pipeline_rank(0)
    ]


def rank_of_stage(plan: Plan) -> dict[int, int]:
    return {stage: rank for rank in range(plan.pp) for stage in plan.stages_of_pipeline_rank(rank)}


def comes_to_an_end(orders: Orders, plan: Plan) -> bool:
    """True if all ranks get through when each waits at every send and receive for its partner.

    No backend is that strict: what passes here cannot hang.
    """
    ranks, at = rank_of_stage(plan), dict.fromkeys(orders, 0)

    def head(rank: int) -> tuple[str, int, int, int | None] | None:
        """(direction and kind, from stage, to stage, micro-batch) if it is communication."""
        action = orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None
        kind = "" if action is None else action.computation_type.name
        if kind not in _PARTNERS:
            return None
        source, target = _PARTNERS[kind]
        return kind, action.stage_index + source, action.stage_index + target, action.microbatch_index

    moved = True
    while moved:
        moved = False
        for rank in orders:
            while at[rank] < len(orders[rank]):
                mine = head(rank)
                if mine is not None:
                    sends = mine[0].startswith("SEND")
                    other = ranks[mine[2] if sends else mine[1]]
                    theirs = head(other)
                    if theirs is None or theirs[1:] != mine[1:] or theirs[0][5:] != mine[0][5:]:
                        break
                    at[other] += 1
                at[rank] += 1
                moved = True
    return all(at[rank] == len(orders[rank]) for rank in orders)


def step_time(orders: Orders, plan: Plan) -> int:
    """Units of one stage's forward from the first forward to the last backward; communication is free."""
    queues = {
        rank: [
            (_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
            for action in actions
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type.name in _KINDS
        ]
        for rank, actions in orders.items()
    }
    clock = dict.fromkeys(orders, 0)
    ends: dict[tuple[str, int, int], int] = {}
    while any(queues.values()):
        left = sum(map(len, queues.values()))
        for rank, queue in queues.items():
            while queue:
                kind, stage, batch = queue[0]
                needs = [("F", stage - 1, batch)] if kind == "F" and stage > 0 else []
                if kind in "IB":
                    needs = [("F", stage, batch)]
                    needs += [("I", stage + 1, batch)] if stage < plan.stage_count - 1 else []
                if any(need not in ends for need in needs):
                    break
                clock[rank] = max([clock[rank], *(ends[need] for need in needs)]) + (2 if kind == "B" else 1)
                ends["I" if kind == "B" else kind, stage, batch] = clock[rank]
                queue.pop(0)
        assert sum(map(len, queues.values())) < left, "the order cannot be run"
    return max(clock.values())


def most_kept(orders: Orders) -> int:
    """Forwards of one stage whose activations the fullest rank keeps at once."""
    most = 0
    for actions in orders.values():
        kept = 0
        for action in actions:
            for part in () if action is None else action.sub_actions or (action,):
                kind = _KINDS.get(part.computation_type.name)
                kept += (kind == "F") - (kind in ("B", "W"))
                most = max(most, kept)
    return most


_PARTNERS = {"SEND_F": (0, 1), "RECV_F": (-1, 0), "SEND_B": (0, -1), "RECV_B": (1, 0)}
"""Offsets of the sending and the receiving stage from the action's own."""
_KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}
