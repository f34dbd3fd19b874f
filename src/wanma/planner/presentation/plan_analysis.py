"""Analysis of a job by `wanma plan`, as data: the plan, the alternatives, and the reasons.

`terminal_tables`, the plan page and `json_output` render it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from wanma.data.opening import text_preparation
from wanma.hardware.discovery.first_use_measurement import with_measured_cpu_peak
from wanma.hardware.discovery.node import discover_node
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.file.loading import to_job
from wanma.job.forecast.forecast import StepTime, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.observe.units import count_text, duration_text
from wanma.planner.explain.comparison import PlanComparison, compare_plans
from wanma.planner.explain.scaling import ScalingPoint, parse_device_range, scaling_curve
from wanma.planner.explain.timeline import Timeline, plan_timeline
from wanma.planner.explain.what_if import apply_changes, parse_changes
from wanma.planner.forecast.problem import PlanningInputs, PlanningProblem, homogeneous_cluster
from wanma.planner.hardware_model.calibration import Calibration, load_calibration
from wanma.planner.infeasibility import no_plan_error
from wanma.planner.job_planner import PlanResult, build_layout, complete_plan
from wanma.planner.plan_search import run_world_sizes, search_plans, time_search_unavailable_reason
from wanma.planner.preparation.job_cluster import job_on_cluster, job_on_hypothetical_cluster
from wanma.planner.preparation.job_planning import job_dimensions, search_by_time
from wanma.planner.preparation.job_workload import WorkloadResult, read_model
from wanma.planner.preparation.loader_workers import loader_workers
from wanma.planner.rules.capabilities import unsupported_reason
from wanma.planner.search.result import Candidate, SearchResult
from wanma.planner.search.space import candidate_world_sizes

MIN_SPEEDUP_WITHOUT = 1.05
"""Least speed-up by leaving nodes out that is told: forecasts of two clusters differ by some percent."""
MAX_COMPARED_GROUPS = 4
"""Most groups of nodes each of which is left out in turn, as each takes another search."""
_KEYS_WITHOUT_LAYOUT = {
    "auto",
    "allow",
    "compile",
    "embedding",
    "embedding_tables",
    "embedding_memory_bytes",
}
"""Keys of [parallel] that leave the layout open."""


class SearchedPlans(NamedTuple):
    """Result of a search, and the comparison of the job's plan with it."""

    search_result: SearchResult
    """Best plans with an open layout."""
    best_comparison: PlanComparison | None
    """Comparison of the job's own plan with the best of `found`; None where it is the best."""


@dataclass(frozen=True)
class Study:
    """Plan of a job on a cluster, with lazily searched alternatives."""

    job: Job
    """Job as it would run on the cluster."""
    cluster: Cluster
    plan_result: PlanResult
    workload: Workload | None
    """Workload of the model; None for a user's own module with unknown inputs."""
    dimensions: DecoderConfig | None
    problem: PlanningProblem | None
    """Planning problem of the chosen plan; None without a workload."""
    unsupported_reason: str | None
    """Reason why the plan is forecast-only; None for a runnable plan."""
    workload_unavailable_reason: str | None = None
    """Reason why there is no workload."""
    time_unavailable_reason: str | None = None
    """Reason why there are no forecasts of time."""
    run_search: Callable[[], SearchedPlans] | None = field(default=None, repr=False, compare=False)
    """Search for the best plans, which takes as long as `auto` does; called only on demand.

    None where there are no forecasts of time.
    """

    @property
    def workers(self) -> int:
        """Loader threads of a rank."""
        planned = self.plan_result
        return loader_workers(self.job, planned.plan, self.cluster, planned.forecast, self.workload)

    @cached_property
    def _searched(self) -> SearchedPlans | None:
        return self.run_search() if self.run_search is not None else None

    @property
    def search_result(self) -> SearchResult | None:
        """Return the best plans with an open layout; None where there are no forecasts of time."""
        return self._searched.search_result if self._searched is not None else None

    @property
    def best_comparison(self) -> PlanComparison | None:
        """Return the comparison of the job's own plan with the best of `found`."""
        return self._searched.best_comparison if self._searched is not None else None

    @property
    def best(self) -> Candidate | None:
        """Return the plan with which the job's plan is compared."""
        return self.search_result.best_or_unsupported if self.search_result is not None else None


@dataclass(frozen=True)
class WhyAnswer:
    """Question about another plan, and the answer."""

    question: str
    """Question as the user writes it: 'tp=16,pp=2'."""
    comparison: PlanComparison | None
    """Comparison of the plan with the best; None where there is no such plan."""
    sentence: str


@dataclass(frozen=True)
class WhatIfAnswer:
    """Plan of the same job on a changed cluster."""

    changes: str
    """Changes as the user writes them: 'gpus=2048'."""
    cluster: Cluster
    study: Study | None
    """Analysis on the changed cluster; None without a plan there."""
    reason: str = ""
    """Reason why there is no plan."""


@dataclass(frozen=True)
class SlowingNodes:
    """Group of nodes without which the job is forecast to be faster, such as one behind a slow link."""

    nodes: NodeGroup
    speedup: float
    """Step time with the group over that without it, above 1."""
    step_seconds: float
    """Step time without it, in seconds."""

    @property
    def sentence(self) -> str:
        return (
            f"without '{self.nodes.name}' ({count_text(self.nodes.count, 'node')}) a step takes "
            f"{duration_text(self.step_seconds)}, {self.speedup:.2g} times as fast: leave it out of the run"
        )


@dataclass(frozen=True)
class PlanAnalysis:
    """Plan analysis with the answers to the user's questions."""

    study: Study
    why_answers: tuple[WhyAnswer, ...] = ()
    what_if_answers: tuple[WhatIfAnswer, ...] = ()
    scaling_points: tuple[ScalingPoint, ...] = ()
    timeline: Timeline | None = None
    slowing_nodes: SlowingNodes | None = None
    """Group that slows the job down most; None: each group helps, or there is one alone."""


@dataclass(frozen=True)
class Questions:
    """Questions of a user beside the plan."""

    whys: Sequence[str] = ()
    """Sizes of [parallel] of other plans: 'tp=16,pp=2'."""
    what_ifs: Sequence[str] = ()
    """Changes to the cluster: 'gpus=2048,link.inter_node=200G'."""
    device_range: str | None = None
    """Range of device counts: '64..4096'."""
    timeline: bool = False
    """True if a timeline of one step is requested."""


def analyze_plan(
    job: Job,
    *,
    device: str | None = None,
    cluster: str | Cluster | None = None,
    questions: Questions = Questions(),
) -> PlanAnalysis:
    """Plan a job and answer questions about it; of its data only samples are read.

    Args:
        job: the job.
        device: plan for as many of this device of the catalogue as the job has ranks, or for a cluster
            shorthand; default: for `cluster`.
        cluster: plan for a cluster, a cluster file, or a cluster shorthand; default: the job's
            `cluster.file`, else the local node.
        questions: questions beside the plan.

    Raises:
        JobError: the job, the cluster or a question is wrong, or the plan fits nowhere.
    """
    for text in questions.what_ifs:
        parse_changes(text)
    for text in questions.whys:
        _job_with_sizes(job, text)
    counts = parse_device_range(questions.device_range) if questions.device_range is not None else []
    if device is None and cluster is None:
        cluster = job.cluster.file
    is_local_cluster = device is None and cluster is None
    own_job, machines = (
        (job, with_measured_cpu_peak(discover_node()))
        if is_local_cluster
        else job_on_hypothetical_cluster(job, device=device, cluster=cluster)
    )
    read = read_model(job)
    if read.workload is not None:
        workload = replace(read.workload, preparation=text_preparation(job.data))
        read = WorkloadResult(workload, read.reason)
    asker = _Analyzer(job, read, job_dimensions(job), load_calibration())
    study = asker.study(own_job, machines, is_local=is_local_cluster)
    return PlanAnalysis(
        study,
        tuple(asker.answer_why(study, text) for text in questions.whys),
        tuple(asker.answer_what_if(machines, text) for text in questions.what_ifs),
        scaling_curve(machines, counts, asker.best_plans),
        asker.timeline(study) if questions.timeline else None,
        asker.slowing_nodes(study),
    )


@dataclass(frozen=True)
class _Analyzer:
    """Inputs of the analysis that stay the same while clusters and layouts vary."""

    job: Job
    workload_result: WorkloadResult
    dimensions: DecoderConfig | None
    calibration: Calibration

    @property
    def workload(self) -> Workload | None:
        return self.workload_result.workload

    def study(self, job: Job, cluster: Cluster, *, is_local: bool = False) -> Study:
        """Return the job's plan on a cluster, with the search for the best one.

        Raises:
            JobError: there is no plan, or none that fits.
        """
        # A real run uses all of its nodes; a hypothetical cluster may be used in part.
        worlds = (
            run_world_sizes(job, cluster)
            if is_local
            else candidate_world_sizes(homogeneous_cluster(job, cluster))
        )
        planned = None
        if job.parallel.auto:
            planned = search_by_time(
                job, cluster, self.workload, self.dimensions, worlds, allow_unsupported=not is_local
            )
        if planned is None:
            start = build_layout(job, cluster)
            planned = complete_plan(job, start, cluster, self.workload, self.dimensions, self.calibration)
        plan = planned.plan
        reason = unsupported_reason(job, plan, cluster)
        if self.workload is None:
            return Study(
                job, cluster, planned, None, self.dimensions, None, reason, self.workload_result.reason
            )
        problem = self._problem(job, cluster, plan.world_size)
        obstacle = time_search_unavailable_reason(self._inputs(job, cluster))

        def look() -> SearchedPlans:
            search_result, comparison = planned.search_result, None
            if search_result is None or _fixes_layout(job):
                search_result = self._search(job_with_open_layout(job), cluster, worlds)
                if (
                    search_result.best_or_unsupported is not None
                    and search_result.best_or_unsupported.plan != plan
                ):
                    comparison = compare_plans(
                        problem, plan, search_result.best_or_unsupported, planned.forecast
                    )
            return SearchedPlans(search_result, comparison)

        return Study(
            job,
            cluster,
            planned,
            self.workload,
            self.dimensions,
            problem,
            reason,
            time_unavailable_reason=obstacle,
            run_search=None if obstacle is not None else look,
        )

    def answer_why(self, study: Study, question: str) -> WhyAnswer:
        """Return the best plan with the sizes in question, compared with the best of all.

        Raises:
            JobError: no such key, or a value that it does not take.
        """
        if study.workload is None or study.search_result is None:
            return WhyAnswer(
                question,
                None,
                f"not available: {study.time_unavailable_reason or study.workload_unavailable_reason}",
            )
        pinned = _job_with_sizes(study.job, question)
        worlds = candidate_world_sizes(homogeneous_cluster(pinned, study.cluster))
        try:
            search_result = self._search(pinned, study.cluster, worlds)
        except JobError as error:
            return WhyAnswer(question, None, error.message)
        chosen = search_result.best_or_unsupported or search_result.smallest
        if chosen is None:
            refused = no_plan_error(
                pinned, study.cluster, study.workload, self.dimensions, search_result, worlds
            )
            return WhyAnswer(question, None, refused.message)
        problem = self._problem(study.job, study.cluster, chosen.plan.world_size)
        comparison = compare_plans(problem, chosen.plan, study.best, chosen.forecast)
        return WhyAnswer(question, comparison, comparison.sentence)

    def answer_what_if(self, cluster: Cluster, changes: str) -> WhatIfAnswer:
        """Return the analysis on a changed cluster.

        Raises:
            JobError: the changed cluster is impossible.
        """
        changed_cluster = apply_changes(cluster, changes)
        try:
            return WhatIfAnswer(
                changes,
                changed_cluster,
                self.study(job_on_cluster(self.job, changed_cluster), changed_cluster),
            )
        except JobError as error:
            return WhatIfAnswer(changes, changed_cluster, None, error.message)

    def best_plans(self, cluster: Cluster) -> SearchResult:
        """Search for the best plans of the job on a cluster, with an open layout.

        Raises:
            JobError: time cannot be forecast there.
        """
        job = job_on_cluster(
            job_with_open_layout(self.job) if not self.job.parallel.auto else self.job, cluster
        )
        if self.workload is None:
            raise JobError(self.workload_result.reason or "the model is unknown")
        obstacle = time_search_unavailable_reason(self._inputs(job, cluster))
        if obstacle is not None:
            raise JobError(obstacle)
        return self._search(job, cluster, candidate_world_sizes(homogeneous_cluster(job, cluster)))

    def slowing_nodes(self, study: Study) -> SlowingNodes | None:
        """Return the group of nodes of a mixed cluster without which the job is fastest, if it is faster."""
        step = study.plan_result.forecast.step if study.plan_result.forecast is not None else None
        groups = study.cluster.nodes
        if step is None or not 1 < len(groups) <= MAX_COMPARED_GROUPS:
            return None
        found = []
        for number, group in enumerate(groups):
            if not may_be_faster_without(group, step, study.plan_result.plan, groups):
                continue
            rest = replace(study.cluster, nodes=(*groups[:number], *groups[number + 1 :]))
            try:
                other = self.study(job_on_cluster(self.job, rest), rest)
            except JobError:  # it needs these nodes
                continue
            forecast = other.plan_result.forecast
            if forecast is not None and forecast.step is not None:
                seconds = forecast.step.seconds
                found.append(SlowingNodes(group, step.seconds / seconds, seconds))
        best = max(found, key=lambda nodes: nodes.speedup, default=None)
        return best if best is not None and best.speedup >= MIN_SPEEDUP_WITHOUT else None

    def timeline(self, study: Study) -> Timeline | None:
        return None if study.problem is None else plan_timeline(study.problem, study.plan_result.plan)

    def _search(self, job: Job, cluster: Cluster, world_sizes: Sequence[int]) -> SearchResult:
        return search_plans(self._inputs(job, cluster), world_sizes=world_sizes)

    def _problem(self, job: Job, cluster: Cluster, world_size: int) -> PlanningProblem:
        (node,) = homogeneous_cluster(job, cluster).nodes
        ranks = 1 if node.devices else math.ceil(world_size / node.count)
        return self._inputs(job, cluster).problem(ranks=ranks)

    def _inputs(self, job: Job, cluster: Cluster) -> PlanningInputs:
        assert self.workload is not None
        return PlanningInputs(job, cluster, self.workload, self.dimensions, self.calibration)


def may_be_faster_without(group: NodeGroup, step: StepTime, plan: Plan, groups: Sequence[NodeGroup]) -> bool:
    """Return whether a job may gain by leaving nodes out: the others take over the work, and nothing else.

    Without a search: the others' shortest time is that of their peak rates, with no communication at all.
    """
    peaks = [
        [device.peak_flops_per_second.get(plan.precision) or 0.0 for device in one.devices]
        or [float(one.cores)]
        for one in groups
    ]
    slowest = min(peak for one in peaks for peak in one)
    if slowest == 0:
        return True
    rates = [one.count * sum(own) for one, own in zip(groups, peaks, strict=True)]
    devices = sum(one.count * len(own) for one, own in zip(groups, peaks, strict=True))
    is_balanced = plan.pp > 1 or plan.batch_shares
    used = sum(rates) if is_balanced else slowest * devices
    left = sum(rates) - rates[[one is group for one in groups].index(True)]
    return step.seconds >= MIN_SPEEDUP_WITHOUT * step.compute * used / left


def _fixes_layout(job: Job) -> bool:
    return bool(job.parallel.model_fields_set - _KEYS_WITHOUT_LAYOUT)


def job_with_open_layout(job: Job) -> Job:
    """Return the job with its layout left open."""
    fields = {key: getattr(job.parallel, key) for key in job.parallel.model_fields_set & _KEYS_WITHOUT_LAYOUT}
    section = type(job.parallel).model_validate({**fields, "auto": True})
    return job.model_copy(update={"parallel": section})


def _job_with_sizes(job: Job, question: str) -> Job:
    """Return the job with the sizes in question and all others open."""
    pins: list[str] = []
    for part in filter(None, (part.strip() for part in question.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise JobError(
                f"--why {question}: '{part}' is not KEY=VALUE", "give KEY=VALUE, for example --why tp=16,pp=2"
            )
        key = key.strip().removeprefix("parallel.")
        pins.append(f"parallel.{key}={value.strip()}")
    if not pins:
        raise JobError("--why is empty", "give KEY=VALUE, for example --why tp=16,pp=2")
    fields: dict[str, Any] = job_with_open_layout(job).model_dump(exclude_unset=True)
    return to_job(fields, pins, f"--why {question}")
