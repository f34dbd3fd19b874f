"""Order in which pipeline ranks hold the stages of a model, by schedule. Pure functions."""

from __future__ import annotations

from wanma.job.sections.parallel import Schedule

V_SHAPED_SCHEDULES: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules whose stages go down the ranks and up again, so that the first rank holds the last stage."""


def stages_of_pipeline_rank(schedule: Schedule, pp: int, pp_rank: int, stage_count: int) -> tuple[int, ...]:
    """Return the indices of the pipeline stages that `pp_rank` holds, in the model's order."""
    if schedule in V_SHAPED_SCHEDULES:
        return pp_rank, 2 * pp - 1 - pp_rank
    return tuple(range(pp_rank, stage_count, pp))
