"""Slurm's text: fields with spaces, states, and the GPUs of a node."""

from __future__ import annotations

import pytest

from wanma.engines.slurm.records import node_facts, parse_gpus, parse_records, run_state

NODE = (
    "NodeName=gpu-01 Arch=x86_64 CoresPerSocket=48  CPUAlloc=0 CPUEfctv=190 CPUTot=192 CPULoad=0.04 "
    "AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:h100:8(S:0-1),nvme:1 NodeAddr=gpu-01 "
    "OS=Linux 5.15.0-91-generic #101-Ubuntu SMP RealMemory=2000000 AllocMem=0 State=IDLE+DRAIN* "
    "Partitions=gpu,long Reason=bad NIC = replaced? [root@2026-11-01T10:00:00]\n"
)


def test_a_value_may_hold_spaces_and_equals_signs() -> None:
    (record,) = parse_records(NODE)
    assert record["OS"] == "Linux 5.15.0-91-generic #101-Ubuntu SMP"
    assert record["Reason"].startswith("bad NIC = replaced?")
    facts = node_facts(record)
    assert (facts.cores, facts.memory_bytes, facts.gpus) == (190, 2_000_000 * 2**20, (("h100", 8),))
    assert facts.states == ("IDLE", "DRAIN")
    assert not facts.is_up
    assert facts.partitions == ("gpu", "long")


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:8", [("", 8)]),
        ("gpu:a100:4(S:0),gpu:v100:2(S:1)", [("a100", 4), ("v100", 2)]),
        ("gpu", [("", 1)]),
        ("gpu:h100", [("h100", 1)]),
        ("nvme:2,gpu:nvidia_a100-sxm4-80gb:8", [("nvidia_a100-sxm4-80gb", 8)]),
        ("shard:8", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_gpus_of(gres: str, gpus: list[tuple[str, int]]) -> None:
    assert list(parse_gpus(gres)) == gpus


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("PENDING", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("COMPLETING", "running"),
        ("CANCELLED by 1000", "cancelled"),
        ("TIMEOUT", "failed"),
        ("SOMETHING_NEW", "unknown"),
    ],
)
def test_state_of_a_job(state: str, expected: str) -> None:
    assert run_state(state) == expected
