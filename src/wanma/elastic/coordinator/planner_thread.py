"""Thread that runs the planner beside the supervisor's event loop, which sends heartbeats meanwhile."""

from __future__ import annotations

import selectors
import socket
import threading
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
    answers: list[ReplanDecision | Exception] = []
    receiver, sender = socket.socketpair()

    def think() -> None:
        try:
            answers.append(replanner.replan(request))
        except WanmaError as error:
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
            answers.append(ReplanDecision(None, 0, reason))
        except Exception as error:  # the loop raises it
            answers.append(error)
        sender.close()

    def answered(_events: int) -> None:
        loop.unwatch(receiver)
        receiver.close()
        (answer,) = answers
        if isinstance(answer, Exception):
            raise answer
        on_decision(answer)

    loop.watch(receiver, answered, selectors.EVENT_READ)
    threading.Thread(target=think, daemon=True, name="wanma-planner").start()
