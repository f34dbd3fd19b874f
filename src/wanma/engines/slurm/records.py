"""Parser of Slurm's text: `scontrol show ... --oneliner` and delimited columns of `squeue`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wanma.engines.engine import RunState

Record = dict[str, str]
"""Fields of one node, partition or job, as Slurm writes them."""

_FIELD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_:/]*)=")
_GPU = re.compile(r"gpu(?::(?P<kind>[^:(,\d][^:(,]*))?(?::(?P<count>\d+))?(?:\([^)]*\))?")

STATES: dict[str, RunState] = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_FED": "pending",
    "REQUEUE_HOLD": "pending",
    "RESV_DEL_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RUNNING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "BOOT_FAIL": "failed",
    "DEADLINE": "failed",
    "FAILED": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "PREEMPTED": "failed",
    "TIMEOUT": "failed",
}
"""State of a run by the state of its job."""


def parse_records(text: str) -> Iterator[Record]:
    """Yield the records of `scontrol show ... --oneliner`; values may contain spaces and equals signs."""
    for line in text.splitlines():
        matches = list(_FIELD.finditer(line))
        if matches:
            ends = [match.start() for match in matches[1:]] + [len(line)]
            yield {
                match[1]: line[match.end() : end].strip() for match, end in zip(matches, ends, strict=True)
            }


def run_state(job_state: str) -> RunState:
    """Return the state of a run; an unknown state of a later Slurm counts as unknown."""
    return STATES.get(job_state.split(" ")[0].rstrip("+"), "unknown")


def job_variables(environment: Mapping[str, str]) -> list[str]:
    """Return the environment variables that describe the job of this shell.

    Commands for other jobs run without them: sbatch and srun would take them for options.
    """
    if "SLURM_JOB_ID" not in environment:
        return []
    return [name for name in environment if name.startswith("SLURM") and name != "SLURM_CONF"]


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node that decide whether a run can use it."""

    name: str
    cores: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...]
    """Kind (empty when Slurm was not told) and number of its GPUs."""
    features: tuple[str, ...]
    states: tuple[str, ...]
    partitions: tuple[str, ...]
    allocated_cores: int
    reason: str
    """Reason given by the administrator for a node that is down or drained, without name and date."""

    @property
    def gpu_count(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def is_up(self) -> bool:
        unusable = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "NOT_RESPONDING"}
        unusable |= {"UNKNOWN", "FUTURE", "POWERING_DOWN", "INVAL"}
        return not unusable & set(self.states)

    @property
    def is_free(self) -> bool:
        """True if a whole node could start a job now."""
        return self.is_up and self.allocated_cores == 0 and "RESERVED" not in self.states


def node_facts(record: Record) -> NodeFacts:
    """Return the facts of a record of `scontrol show node`."""
    return NodeFacts(
        name=record["NodeName"],
        cores=int(record.get("CPUEfctv") or record.get("CPUTot") or 1),
        memory_bytes=int(record.get("RealMemory") or 1) * 2**20,
        gpus=tuple(parse_gpus(record.get("Gres", ""))),
        features=_words(record.get("AvailableFeatures", "")),
        states=tuple(re.sub(r"[*~#!%$@^-]+$", "", state) for state in record.get("State", "").split("+")),
        partitions=_words(record.get("Partitions", "")),
        allocated_cores=int(record.get("CPUAlloc") or 0),
        reason=re.sub(r" \[[^\]]*\]$", "", record.get("Reason", "")),
    )


def parse_gpus(gres: str) -> Iterator[tuple[str, int]]:
    """Yield kind and number of the GPUs in generic resources such as 'gpu:h100:8(S:0-1),nvme:1'."""
    for match in re.finditer(r"(?:^|,)" + _GPU.pattern + r"(?=,|$)", gres):
        yield match["kind"] or "", int(match["count"] or 1)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word != "(null)")


def parse_time_limit(text: str) -> float | None:
    """Return the seconds of a time in any form that sbatch(1) takes for --time; None: there is no limit.

    Forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; UNLIMITED, INFINITE and NONE name no limit.
    """
    days, mark, clock = text.rpartition("-")
    try:
        numbers = [int(number) for number in clock.split(":")]
        if not mark and len(numbers) < 3:
            numbers.insert(0, 0)  # it begins with minutes
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return float(int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds)
    except ValueError:
        return None
