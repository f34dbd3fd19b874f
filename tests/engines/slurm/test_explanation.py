"""Reasons for waiting and refusals of sbatch, in plain words."""

from __future__ import annotations

import pytest

from wanma.engines.scheduler_command import SchedulerCommandError
from wanma.engines.slurm.explanation import explain_job, explain_refusal
from wanma.engines.slurm.records import node_facts, parse_records

NODES = [
    node_facts(record)
    for record in parse_records(
        "NodeName=n1 CPUAlloc=0 CPUTot=8 RealMemory=1 State=IDLE Partitions=main\n"
        "NodeName=n2 CPUAlloc=8 CPUTot=8 RealMemory=1 State=ALLOCATED Partitions=main\n"
        "NodeName=n3 CPUAlloc=0 CPUTot=8 RealMemory=1 State=DOWN Partitions=main Reason=no power [root@now]\n"
        "NodeName=o1 CPUAlloc=0 CPUTot=8 RealMemory=1 State=IDLE Partitions=other\n"
    )
]


def job(reason: str, nodes: str = "2-2", start: str = "Unknown") -> dict[str, str]:
    return {"JobId": "7", "Reason": reason, "NumNodes": nodes, "Partition": "main", "StartTime": start}


def test_too_few_nodes_names_the_size_that_would_start_at_once() -> None:
    explanation = explain_job(job("Resources", start="2026-12-01T10:00:00"), NODES)
    assert explanation.summary == (
        "job 7 waits for 2 nodes of the partition 'main': too few nodes are free (Slurm: Resources)"
    )
    assert explanation.advice == (
        "1 of 3 nodes there are free, 2 are up",
        "down: n3: no power",
        "with 1 node it could start at once: `wanma resize RUN --nodes 1`, if its range of nodes allows it",
        "Slurm expects it to start at 2026-12-01T10:00:00",
    )


def test_a_job_that_can_never_start_is_told() -> None:
    advice = explain_job(job("ReqNodeNotAvail,_UnavailableNodes:n3", nodes="3"), NODES).advice
    assert "with 2 nodes at most it could start; with 3 it does not as things stand" in advice


@pytest.mark.parametrize(
    ("reason", "meaning"),
    [
        ("Priority", "jobs of higher priority"),
        ("DependencyNeverSatisfied", "never starts"),
        ("AssocGrpGRES", "a limit of your account or QOS on resources"),
        ("QOSMaxJobsPerUserLimit", "a limit of your account or QOS on jobs"),
        ("PartitionTimeLimit", "longer than the partition's"),
        ("launch_failed_requeued_held", "its start failed on a node"),
        ("QuantumFlux", "wanma does not know"),
    ],
)
def test_meaning_of(reason: str, meaning: str) -> None:
    assert meaning in explain_job(job(reason), NODES).summary


@pytest.mark.parametrize(
    ("output", "meaning", "way_out"),
    [
        ("sbatch: error: invalid partition specified: gpux", "no such partition", "cluster.slurm.partition"),
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            "quality of service",
            "slurm.qos",
        ),
        (
            "Batch job submission failed: Requested node configuration is not available",
            "no such nodes",
            "nodes",
        ),
        ("Unable to contact slurm controller (connect failure)", "does not answer", "later"),
        ("User's group not permitted to use this partition", "may not use", "another"),
        ("allocation failure: Access/permission denied", "may not use this partition", "administrator"),
        (
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "the account does not exist",
            "cluster.slurm.account",
        ),
        (
            "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size "
            "and/or time limits)",
            "a limit of your account",
            "fewer nodes",
        ),
        (
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
            "longer than the partition allows",
            "cluster.slurm.time",
        ),
        ("Batch job submission failed: Invalid feature specification", "no node has", "slurm.constraint"),
        (
            "Batch job submission failed: Invalid generic resource (gres) specification",
            "no node has such GPUs",
            "slurm.gres",
        ),
        (
            "Batch job submission failed: I/O error writing script/environment to file",
            "a disk or quota of the controller is full",
            "administrator",
        ),
    ],
)
def test_refusal_of_sbatch(output: str, meaning: str, way_out: str) -> None:
    refusal = explain_refusal(SchedulerCommandError("`sbatch ...` failed", "", output))
    assert meaning in refusal.message
    assert way_out in refusal.hint
