"""Data of the current step as a run reports it: samples that cannot be read, and the time of loading."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from wanma.collectives.object_all_gather import all_gather_objects
from wanma.data.batch import Batch, find_nonfinite_samples
from wanma.data.cache.node_cache import process_traffic
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.handover.sample_reading import SampleReading
from wanma.data.step_loader import StepBatches
from wanma.data.stores.client import Traffic
from wanma.job.errors import STORAGE_EXTRAS, JobError
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.data import DataSection
from wanma.parallel.mesh.parallel_mesh import ParallelMesh

log = logging.getLogger("wanma.data")

_OTHER_STORE = "other"
"""Name of all stores whose protocols are not known to wanma."""
_MAX_NODES_BY_NAME = 64
"""Largest number of nodes whose traffic is also recorded by node: with more, a record would be long."""


class StepData:
    """Report of the data of each step on one rank.

    Args:
        path: file of the samples that cannot be read, one JSON object per line.
        parallel_mesh: this rank's place; of the ranks that read the same samples, one writes.
        message: function (text, level) that shows the user a message, on rank 0.
        section: the job's `[data]`. More different samples of all ranks that cannot be read than
            `bad_data_limit`, with the files that were left out as a whole, end the run.
        worker: this rank's node among those of the run.
    """

    def __init__(
        self,
        path: Path,
        parallel_mesh: ParallelMesh,
        message: Callable[[str, str], None],
        section: DataSection,
        worker: WorkerContext,
    ) -> None:
        self._path, self._message, self._limit = path, message, section.bad_data_limit
        self._skips_bad = section.bad_data in ("skip", "substitute")
        self._world_size = parallel_mesh.plan.world_size
        self._writes = parallel_mesh.contributes_loss and parallel_mesh.coordinate("cp") == 0
        self._data: BatchedDataset | None = None
        self._step: StepBatches | None = None
        self._has_peers = parallel_mesh.plan.pp * parallel_mesh.plan.cp * parallel_mesh.plan.tp > 1
        self.reading: SampleReading | None = None
        """Way in which this rank gets its samples; None: each rank reads its own, or nothing is read yet."""
        self._samples_read = 0
        stores, nodes = (*STORAGE_EXTRAS, _OTHER_STORE), len(worker.local_world_sizes)
        by_name = nodes if 1 < nodes <= _MAX_NODES_BY_NAME else 0
        self._traffic_keys = [
            *(("store_requests", store) for store in stores),
            *(("store_bytes", store) for store in stores),
            *(("cache_blocks", kind) for kind in ("hit", "miss")),
            *(("node_requests", str(node)) for node in range(by_name)),
            *(("node_bytes", str(node)) for node in range(by_name)),
        ]
        """Amounts that ranks add up: the same on every rank, whatever stores it reads."""
        self._node = str(worker.node_rank)
        self._own_traffic: Traffic = Counter()
        """Traffic of this rank so far."""
        self._traffic: Traffic = Counter()
        """Traffic of all ranks since the last record."""
        self._has_met_bad_sample = False
        self._new_bad_samples = 0
        """Samples of this rank that cannot be read, since the last exchange."""
        self._bad_samples = 0
        """Bad samples of all ranks so far."""
        self._bad_places: set[str] = set()
        self._gathered_count = 0
        """Sum over the ranks of their different bad samples when these were last joined."""

    def begin(self, data: BatchedDataset, step: StepBatches) -> None:
        """Take the data of the step that begins, and list its samples that cannot be read."""
        self._data, self._step = data, step
        found = step.bad_samples
        if not found:
            return
        lines = [
            {
                "step": step.step + 1,
                "time": time.time(),
                "sample": one.sample,
                "place": one.place,
                "cause": one.cause,
                "action": "substitute" if one.is_substituted else "skip",
            }
            for one in found
        ]
        if self._writes:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
        if not self._has_met_bad_sample:
            action = "another one is read instead" if found[0].is_substituted else "its position is skipped"
            text = f"data: {found[0].place}: {found[0].cause}; {action}. All are listed in {self._path.name}"
            self._message(text, "warning")
            log.warning("%s", text)
        self._has_met_bad_sample = True
        self._new_bad_samples += len(found)
        self._bad_places |= {one.place for one in found}

    def exchanged_terms(self) -> tuple[float, ...]:
        """Return the numbers that the rank adds to the step's all-reduce, as many on every rank.

        Traffic and bad samples are those since the last call, so it is called once a step.
        """
        terms: list[float] = []
        if self._has_peers:
            terms.append(self.reading.training_samples_read if self.reading is not None else 0)
        if self._skips_bad:
            terms += (self._new_bad_samples, len(self._bad_places)) if self._writes else (0, 0)
            self._new_bad_samples = 0
        return tuple(map(float, [*terms, *self._traffic_terms()]))

    def add_traffic(self, traffic: Traffic) -> None:
        """Count traffic of other processes as that of this rank."""
        self._own_traffic.subtract(traffic)

    def _traffic_terms(self) -> list[int]:
        """Return this rank's traffic with stores and node caches since the last call, by `_traffic_keys`."""
        times = self._data.load_times if self._data is not None else None
        totals = process_traffic() if times is None else times.traffic
        new: Traffic = Counter()
        for (kind, name), amount in (totals - self._own_traffic).items():
            new[kind, name if (kind, name) in self._traffic_keys else _OTHER_STORE] += amount
            new[kind.replace("store_", "node_"), self._node] += amount
        self._own_traffic = totals
        return [new[key] for key in self._traffic_keys]

    def take_exchanged_sums(self, sums: Sequence[float], bad_places: Iterable[str] = ()) -> None:
        """Take the sums of `exchanged_terms`; every rank calls it.

        Args:
            sums: sums over all ranks.
            bad_places: with parameter servers, whose worker 0 alone calls it: places of the samples of all
                workers that cannot be read.

        Raises:
            JobError: more samples and files cannot be read than the job allows; the same on all ranks.
        """
        left = map(int, sums)
        if self._has_peers:
            self._samples_read = next(left)
        new, different = (next(left), next(left)) if self._skips_bad else (0, 0)
        self._bad_samples += new
        self._traffic.update(dict(zip(self._traffic_keys, left, strict=False)))
        if self._skips_bad:
            self._bad_places.update(bad_places)
            self._refuse_many_bad(different if self._world_size > 1 else len(self._bad_places))

    def _refuse_many_bad(self, count: int) -> None:
        """Refuse more different bad samples than the limit; ranks may have met the same in other epochs.

        Args:
            count: sum over the ranks of the different ones that each has met.
        """
        files = self._data.bad_file_count if self._data is not None else 0
        if count == self._gathered_count or count + files <= self._limit:
            return
        self._gathered_count = count
        places = set[str]().union(
            *all_gather_objects(self._bad_places if self._writes else set(), self._world_size)
        )
        if len(places) + files > self._limit:
            file_text = f" and {files} whole files" if files else ""
            # Not a failure of a rank: a restart would count the same samples again.
            raise JobError(
                f"data: {len(places)} samples{file_text} cannot be read, more than data.bad_data_limit = "
                f"{self._limit}",
                f"mend the data, listed in {self._path.with_name('bad-samples-*.jsonl')}, or raise "
                "data.bad_data_limit",
            )

    def non_finite_sample_names(self) -> list[str]:
        """Return the names of this rank's samples with a NaN or infinity among their inputs or targets."""
        return self._names_of(find_nonfinite_samples)

    def sample_names(self) -> list[str]:
        """Return the names of this rank's samples."""
        return self._names_of(lambda batch: batch.samples[batch.real].tolist())

    def _names_of(self, select: Callable[[Batch], list[int]]) -> list[str]:
        """Return the names of the samples that `select` takes from each micro-batch."""
        if self._data is None or self._step is None:
            return []
        return [self._data.sample_name(number) for one in self._step.micro_batches for number in select(one)]

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of loading since the last call: seconds and traffic; and bad samples so far."""
        times = self._data.load_times if self._data is not None else None
        return {
            **({} if times is None else {"load_seconds": times.take()}),
            **self._take_traffic(),
            **({"bad_samples": self._bad_samples} if self._bad_samples else {}),
            **({"samples_read": self._samples_read} if self._has_peers else {}),
        }

    def _take_traffic(self) -> dict[str, dict[str, int]]:
        """Return requests and bytes by store and by node, and blocks of node caches, since the last call."""
        groups: dict[str, dict[str, int]] = {}
        for (group, name), amount in (+self._traffic).items():
            groups.setdefault(group, {})[name] = amount
        self._traffic.clear()
        return groups
