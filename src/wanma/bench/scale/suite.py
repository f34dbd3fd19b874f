"""Suite of a scaling: the job of a file on several numbers of ranks, each a contender."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.bench.figures.scaling import SCALING_KEYS, THROUGHPUT
from wanma.bench.programs.contender import override_texts
from wanma.bench.runner import Rule
from wanma.bench.scale.growth import Growth, default_axis, growth_of
from wanma.bench.scale.measured import contender_name
from wanma.bench.scale.targets import target_of_cluster, target_of_device
from wanma.bench.suites.scale_table import ScaleTable, doubled_counts
from wanma.bench.suites.scaled_contenders import THREADS, equal_threads
from wanma.bench.suites.suite_file import (
    ContenderTable,
    Suite,
    SuiteFile,
    make_suite,
    override_text,
    source_text,
)
from wanma.bench.suites.suite_of_job import override_settings, read_suite_file_or_job
from wanma.hardware.cluster_file.node_builder import parse_nics
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import to_job


def scale_suite(
    path: Path, options: Mapping[str, Any], *, overrides: Sequence[str] = (), steps: int | None = None
) -> tuple[Suite, Rule]:
    """Return suite and rule of the scaling of a job, or of the job of a suite.

    Args:
        options: keys of `ScaleTable`. Without `measure` ranks are 1, 2, 4 ... to the GPUs or cores of this
            node; without `batch_ranks` the job's global batch is that of the fewest that are measured.
        overrides: settings on every number of ranks, as KEY=VALUE.

    Raises:
        WanmaError: the file has no single job, or an option contradicts it.
    """
    file = read_suite_file_or_job(path)
    settings = _common_settings(path, file, override_settings(overrides))
    plain = make_suite(
        path.stem,
        file.model_copy(update={"contenders": [], "over": {}, "baseline": None, "weak": False}),
        path.parent,
        source=str(path),
    )
    source = source_text(str(path), overrides)
    job = to_job(tomllib.loads(plain.job_text), override_texts(settings), source, str(path))
    (node,) = discover_node().nodes
    device = "cuda" if node.devices and job.cluster.device != "cpu" else "cpu"
    # Read here too, so that a wrong one is refused before anything is measured.
    others = [*map(target_of_cluster, options.get("clusters", ()))]
    others += map(target_of_device, options.get("gpus", ()))
    if "network" in options:
        parse_nics(options["network"])
    has_accelerators = any(target.has_accelerators for target in others)
    axis = options.get("axis") or default_axis(job, "cuda" if has_accelerators else device)
    growth = growth_of(job, axis, is_weak=False, batch_ranks=1, settings=settings)
    limit = len(node.devices) if device == "cuda" else node.cores
    measure = _measured_ranks(options.get("measure"), growth, limit)
    if device == "cpu" and measure and job.cluster.threads_per_rank is None:
        settings[THREADS] = str(equal_threads(node.cores, measure[-1]))
    fewest = min(measure, default=growth.others)
    found = {"batch_ranks": fewest, **options, "measure": measure, "axis": axis, "settings": settings}
    table = ScaleTable.model_validate(found)
    growth = growth_of(
        job, axis, is_weak=table.weak, batch_ranks=table.batch_ranks, settings=dict(table.settings)
    )
    contenders = [
        ContenderTable(name=contender_name(growth, ranks), settings={**growth.settings_of(ranks)})
        for ranks in measure
    ]
    changes: dict[str, Any] = {
        "title": f"Scaling of {file.title or path.stem}",
        "contenders": contenders,
        "over": {},
        "weak": False,  # the settings of the contenders have their batches
        "baseline": contenders[0].name if len(contenders) > 1 else None,
        "scale": table,
    }
    if steps is not None:
        changes["rule"] = file.rule.model_copy(update={"steps": steps})
    if THROUGHPUT not in file.metrics:
        changes["metrics"] = [THROUGHPUT, *file.metrics]
    file = file.model_copy(update=changes)
    return make_suite(f"scale-{path.stem}", file, path.parent, source=str(path)), file.rule


def _measured_ranks(given: Sequence[int] | None, growth: Growth, limit: int) -> list[int]:
    """Return the numbers of ranks to be measured.

    Raises:
        WanmaError: one is no multiple of the dimensions that do not grow.
    """
    if given is None:
        return [count * growth.others for count in doubled_counts(1, max(limit // growth.others, 1))]
    wrong = [count for count in given if count % growth.others]
    if wrong:
        raise WanmaError(
            f"--measure {', '.join(map(str, wrong))}: the mesh dimensions beside {growth.axis} take "
            f"{growth.others} ranks",
            f"give multiples of {growth.others}",
            EXIT_USAGE,
        )
    return sorted(set(given))


def _common_settings(path: Path, file: SuiteFile, overrides: dict[str, str]) -> dict[str, str]:
    """Return the settings of all ranks: those of the suite's only contender, and the overrides.

    Raises:
        WanmaError: the suite has no job, or several contenders that are no scaling.
    """
    tables = file.contenders
    if file.job is None or any(table.command for table in tables) or len(tables) > 1:
        raise WanmaError(
            f"{path} has no single job whose ranks could grow",
            "give a job file, or a suite with a job and without [[contenders]]",
            EXIT_USAGE,
        )
    left = [key for key in file.over if key not in SCALING_KEYS and key not in overrides]
    if left:
        raise WanmaError(
            f"{path} varies {', '.join(left)}",
            f"give one value: {' '.join(f'{key}=VALUE' for key in left)}",
            EXIT_USAGE,
        )
    own = {key: override_text(value) for table in tables for key, value in table.settings.items()}
    return {**own, **overrides}
