"""Check of contenders that are to live at once: each can be stopped while another runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wanma.bench.programs.contender import Contender
from wanma.bench.turns.program_processes import WAY_OUT
from wanma.bench.turns.turn_order import MAX_STOP_SECONDS
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_job


def check_turns(contenders: Sequence[Contender], turn_seconds: float) -> None:
    """Check that contenders can take turns, before any is measured.

    Args:
        contenders: contenders of a round, whose job files exist.
        turn_seconds: duration of a turn.

    Raises:
        WanmaError: there is one contender, or one that cannot be stopped, or stops would be too long.
    """
    if len(contenders) < 2:
        raise WanmaError("turns are of two contenders or more, and there is one", WAY_OUT, EXIT_USAGE)
    for contender in contenders:
        if reason := _obstacle(contender):
            raise WanmaError(f"{contender.name} cannot take turns: {reason}", WAY_OUT, EXIT_USAGE)
    others = len(contenders) - 1
    stop_seconds = others * turn_seconds
    if stop_seconds > MAX_STOP_SECONDS:
        raise WanmaError(
            f"turns of {turn_seconds:g} s stop each of {len(contenders)} contenders for {stop_seconds:g} s, "
            f"and watchdogs of programs are only sure to bear {MAX_STOP_SECONDS:g} s",
            f"shorten the turns to {MAX_STOP_SECONDS / others:.3g} s, or measure fewer contenders at once",
            EXIT_USAGE,
        )


def _obstacle(contender: Contender) -> str:
    """Return the reason why a contender cannot take turns; empty: it can."""
    if contender.fault is not None:
        return "it has a fault, and a recovery is timed by clocks that go on while it is stopped"
    if contender.kind != "job":
        return ""
    job = load_job(Path(contender.job), contender.overrides)
    if job.cluster.engine != "local":
        return f"programs are stopped on this machine alone, and cluster.engine is '{job.cluster.engine}'"
    if job.parallel.load_balancing == "on":
        return "parallel.load_balancing is 'on', and shares would follow step times with stops inside"
    return ""
