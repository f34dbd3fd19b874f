"""Thread that runs the planner beside the supervisor's event loop, which sends heartbeats meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from wanma.elastic.launch_config import Replanner
from wanma.elastic.recovery.replan import ReplanDecision, ReplanRequest
from wanma.elastic.transport.event_loop import EventLoop
from wanma.job.errors import WanmaError


def replan_in_thread(
    replanner: Replanner,
    request: ReplanRequest,
    loop: EventLoop,
    on_decision: Callable[[ReplanDecision], None],
) -> None:
    """Call `on_decision` in the loop with the planner's decision; a refusal is a decision, too.

    An error in the planner is raised in the loop.
    """

    def think() -> ReplanDecision:
        try:
            return replanner.replan(request)
        except WanmaError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
            return ReplanDecision(None, 0, reason)

    loop.call_in_thread(think, on_decision, "wanma-planner")
