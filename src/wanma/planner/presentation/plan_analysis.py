"""Analysis of a job by `wanma plan`, as data: the plan, the alternatives, and the reasons.

`terminal_tables`, the plan page and `json_output` render it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from wanma.hardware.discovery.first_use_measurement import with_measured_processor
from wanma.hardware.discovery.node import discover
from wanma.job.cluster import Cluster
from wanma.job.errors import JobError
from wanma.job.file.loading import job_from
from wanma.job.forecast.forecast import Workload
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderDimensions
from wanma.planner.explain.comparison import Comparison, compare
from wanma.planner.explain.scaling import ScalePoint, scale_counts, scaling
from wanma.planner.explain.timeline import Timeline, timeline_of
from wanma.planner.explain.what_if import changed, parse
from wanma.planner.forecast.problem import Problem, equal_machines, problem_of
from wanma.planner.hardware_model.calibration import Calibration, load_calibration
from wanma.planner.infeasibility import no_plan
from wanma.planner.job_planner import Planned, complete, layout
from wanma.planner.plan_search import find_plans, run_worlds, why_not_by_time
from wanma.planner.preparation.job_cluster import imagined, run_on
from wanma.planner.preparation.job_planning import by_time, job_dimensions
from wanma.planner.preparation.job_workload import ModelRead, read_model
from wanma.planner.rules.capabilities import not_runnable
from wanma.planner.search.result import Candidate, Found
from wanma.planner.search.space import usable_devices

_NO_LAYOUT = {"auto", "allow", "compile"}
"""Keys of [parallel] that leave the layout open."""


class Searched(NamedTuple):
    """Result of a search, and the comparison of the job's plan with it."""

    found: Found
    """Best plans with an open layout."""
    beside_best: Comparison | None
    """Comparison of the job's own plan with the best of `found`; None where it is the best."""


@dataclass(frozen=True)
class Study:
    """Plan of a job on a cluster, with lazily searched alternatives."""

    job: Job
    """Job as it would run on the cluster."""
    cluster: Cluster
    planned: Planned
    workload: Workload | None
    """Workload of the model; None for a user's own module with unknown inputs."""
    dimensions: DecoderDimensions | None
    problem: Problem | None
    """Planning problem of the chosen plan; None without a workload."""
    forecast_only: str | None
    """Reason why the plan is forecast-only; None for a runnable plan."""
    unread: str | None = None
    """Reason why there is no workload."""
    untimed: str | None = None
    """Reason why there are no forecasts of time."""
    look: Callable[[], Searched] | None = field(default=None, repr=False, compare=False)
    """Search for the best plans, which takes as long as `auto` does; called only on demand.

    None where there are no forecasts of time.
    """

    @cached_property
    def _searched(self) -> Searched | None:
        return self.look() if self.look is not None else None

    @property
    def found(self) -> Found | None:
        """Return the best plans with an open layout; None where there are no forecasts of time."""
        return self._searched.found if self._searched is not None else None

    @property
    def beside_best(self) -> Comparison | None:
        """Return the comparison of the job's own plan with the best of `found`."""
        return self._searched.beside_best if self._searched is not None else None

    @property
    def best(self) -> Candidate | None:
        """Return the plan with which the job's plan is compared."""
        return self.found.shown if self.found is not None else None


@dataclass(frozen=True)
class Why:
    """Question about another plan, and the answer."""

    asked: str
    """Question as the user writes it: 'tp=16,pp=2'."""
    answer: Comparison | None
    """Comparison of the plan with the best; None where there is no such plan."""
    sentence: str


@dataclass(frozen=True)
class WhatIf:
    """Plan of the same job on a changed cluster."""

    changes: str
    """Changes as the user writes them: 'gpus=2048'."""
    cluster: Cluster
    study: Study | None
    """Analysis on the changed cluster; None without a plan there."""
    reason: str = ""
    """Reason why there is no plan."""


@dataclass(frozen=True)
class Answers:
    """Plan analysis with the answers to the user's questions."""

    study: Study
    whys: tuple[Why, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    scale: tuple[ScalePoint, ...] = ()
    timeline: Timeline | None = None


@dataclass(frozen=True)
class Questions:
    """Questions of a user beside the plan."""

    whys: Sequence[str] = ()
    """Sizes of [parallel] of other plans: 'tp=16,pp=2'."""
    what_ifs: Sequence[str] = ()
    """Changes to the cluster: 'gpus=2048,link.inter_node=200G'."""
    scale: str | None = None
    """Range of device counts: '64..4096'."""
    timeline: bool = False
    """True if a timeline of one step is requested."""


def answer(
    job: Job, *, device: str | None = None, cluster: str | None = None, questions: Questions = Questions()
) -> Answers:
    """Plan a job and answer questions about it, without reading its data.

    Args:
        job: the job.
        device: plan for as many of this device of the catalogue as the job has ranks, or for a cluster
            shorthand; default: for `cluster`.
        cluster: plan for a cluster file, or a cluster shorthand; default: the job's `cluster.file`, else the
            local node.
        questions: questions beside the plan.

    Raises:
        JobError: the job, the cluster or a question is wrong, or the plan fits nowhere.
    """
    for text in questions.what_ifs:
        parse(text)
    for text in questions.whys:
        _pinned(job, text)
    counts = scale_counts(questions.scale) if questions.scale is not None else []
    if device is None and cluster is None:
        cluster = job.cluster.file
    is_here = device is None and cluster is None
    mine, machines = (
        (job, with_measured_processor(discover()))
        if is_here
        else imagined(job, device=device, cluster=cluster)
    )
    asker = _Asker(job, read_model(job), job_dimensions(job), load_calibration())
    study = asker.study(mine, machines, is_here=is_here)
    return Answers(
        study,
        tuple(asker.why(study, text) for text in questions.whys),
        tuple(asker.what_if(machines, text) for text in questions.what_ifs),
        scaling(machines, counts, asker.best_plans),
        asker.timeline(study) if questions.timeline else None,
    )


@dataclass(frozen=True)
class _Asker:
    """Inputs of the analysis that stay the same while clusters and layouts vary."""

    job: Job
    read: ModelRead
    dimensions: DecoderDimensions | None
    calibration: Calibration

    @property
    def workload(self) -> Workload | None:
        return self.read.workload

    def study(self, job: Job, machines: Cluster, *, is_here: bool = False) -> Study:
        """Return the job's plan on a cluster, with the search for the best one.

        Raises:
            JobError: there is no plan, or none that fits.
        """
        # A real run uses all of its nodes; a hypothetical cluster may be used in part.
        worlds = run_worlds(job, machines) if is_here else usable_devices(equal_machines(job, machines))
        planned = None
        if job.parallel.auto:
            planned = by_time(
                job, machines, self.workload, self.dimensions, worlds, or_forecast_only=not is_here
            )
        if planned is None:
            start = layout(job, machines)
            planned = complete(job, start, machines, self.workload, self.dimensions, self.calibration)
        plan = planned.plan
        reason = not_runnable(job, plan, machines)
        if self.workload is None:
            return Study(job, machines, planned, None, self.dimensions, None, reason, self.read.reason)
        problem = self._problem(job, machines, plan.world_size)
        untimed = why_not_by_time(job, machines, self.workload, self.dimensions, self.calibration)

        def look() -> Searched:
            found, beside = planned.found, None
            if found is None or _fixes_layout(job):
                found = self._find(_free(job), machines, worlds)
                if found.shown is not None and found.shown.plan != plan:
                    beside = compare(problem, plan, found.shown, planned.forecast)
            return Searched(found, beside)

        return Study(
            job,
            machines,
            planned,
            self.workload,
            self.dimensions,
            problem,
            reason,
            untimed=untimed,
            look=None if untimed is not None else look,
        )

    def why(self, study: Study, asked: str) -> Why:
        """Return the best plan with the sizes in question, compared with the best of all.

        Raises:
            JobError: no such key, or a value that it does not take.
        """
        if study.workload is None or study.found is None:
            return Why(asked, None, f"cannot be said: {study.untimed or study.unread}")
        pinned = _pinned(study.job, asked)
        worlds = usable_devices(equal_machines(pinned, study.cluster))
        try:
            found = self._find(pinned, study.cluster, worlds)
        except JobError as error:
            return Why(asked, None, error.message)
        chosen = found.shown or found.nearest
        if chosen is None:
            refused = no_plan(pinned, study.cluster, study.workload, self.dimensions, found, worlds)
            return Why(asked, None, refused.message)
        problem = self._problem(study.job, study.cluster, chosen.plan.world_size)
        told = compare(problem, chosen.plan, study.best, chosen.forecast)
        return Why(asked, told, told.sentence)

    def what_if(self, machines: Cluster, text: str) -> WhatIf:
        """Return the analysis on a changed cluster.

        Raises:
            JobError: the changed cluster is impossible.
        """
        other = changed(machines, text)
        try:
            return WhatIf(text, other, self.study(run_on(self.job, other), other))
        except JobError as error:
            return WhatIf(text, other, None, error.message)

    def best_plans(self, machines: Cluster) -> Found:
        """Search for the best plans of the job on a cluster, with an open layout.

        Raises:
            JobError: time cannot be forecast there.
        """
        job = run_on(_free(self.job) if not self.job.parallel.auto else self.job, machines)
        if self.workload is None:
            raise JobError(self.read.reason or "nothing is known of the model")
        untimed = why_not_by_time(job, machines, self.workload, self.dimensions, self.calibration)
        if untimed is not None:
            raise JobError(untimed)
        return self._find(job, machines, usable_devices(equal_machines(job, machines)))

    def timeline(self, study: Study) -> Timeline | None:
        return None if study.problem is None else timeline_of(study.problem, study.planned.plan)

    def _find(self, job: Job, machines: Cluster, worlds: Sequence[int]) -> Found:
        assert self.workload is not None
        return find_plans(job, machines, self.workload, self.dimensions, self.calibration, worlds=worlds)

    def _problem(self, job: Job, machines: Cluster, world: int) -> Problem:
        assert self.workload is not None
        (node,) = equal_machines(job, machines).nodes
        ranks = 1 if node.devices else math.ceil(world / node.count)
        return problem_of(job, machines, self.workload, self.dimensions, self.calibration, ranks=ranks)


def _fixes_layout(job: Job) -> bool:
    return bool(job.parallel.model_fields_set - _NO_LAYOUT)


def _free(job: Job) -> Job:
    """Return the job with its layout left open."""
    kept = {key: getattr(job.parallel, key) for key in job.parallel.model_fields_set & _NO_LAYOUT}
    section = type(job.parallel).model_validate({**kept, "auto": True})
    return job.model_copy(update={"parallel": section})


def _pinned(job: Job, asked: str) -> Job:
    """Return the job with the sizes in question and all others open."""
    pins: list[str] = []
    for part in filter(None, (part.strip() for part in asked.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise JobError(f"--why {asked}: '{part}' is no KEY=VALUE", "for example --why tp=16,pp=2")
        key = key.strip().removeprefix("parallel.")
        pins.append(f"parallel.{key}={value.strip()}")
    if not pins:
        raise JobError("--why asks about nothing", "for example --why tp=16,pp=2")
    told: dict[str, Any] = _free(job).model_dump(exclude_unset=True)
    return job_from(told, pins, f"--why {asked}")
