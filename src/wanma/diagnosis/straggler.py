"""Straggler that the run's detector has reported: its cause, from its node's records of usage and of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from wanma.diagnosis.evidence import Evidence, RankWork
from wanma.diagnosis.finding import MIN_SHARE, Finding
from wanma.observe.units import bytes_text, duration_text, percent_text

MIN_WORKING_CORES = 0.5
"""Processors in use below which a rank that works longer than its peers is kept from them."""
MIN_THROTTLED_SHARE = 0.2
"""Share of the readings in which a GPU is throttled from which that counts as the cause."""
SLOW_CLOCK_RATIO = 0.9
"""Ratio of a GPU's clock to that of its peers' GPUs below which it counts as the cause."""
MIN_DISK_WAIT_SHARE, MIN_DISK_WAIT_RATIO = 0.1, 0.25
"""Share of the time in which programs of a node wait for a disk, and its ratio to a rank's waits for data,
from which the disk is their cause. The kernel counts less of it while other processors are busy."""
_UNKNOWN_CHANGE = "compare its device by `wanma bench machine`, and the lengths of its samples"


def find_straggler(evidence: Evidence) -> Finding | None:
    if not evidence.stragglers or evidence.step_seconds is None:
        return None
    event = evidence.stragglers[0]
    rank, seconds, peer_seconds = event["rank"], event["seconds"], event["peers_seconds"]
    own = next((work for work in evidence.ranks if work.rank == rank), None)
    peers = [work for work in evidence.ranks if own is not None and own.is_peer(work)]
    if own is not None and peers:  # the event may be long past
        seconds, peer_seconds = own.work_seconds, median(work.work_seconds for work in peers)
    additional = seconds - peer_seconds
    if additional < MIN_SHARE * evidence.step_seconds:
        return None
    texts = [
        f"rank {rank} on node {event['node']} works {duration_text(seconds)} a step, its peers "
        f"{duration_text(peer_seconds)}"
    ]
    # Peers sleep while they wait, so only the processor time of a whole step can be compared.
    used, cores = None, [work.cores for work in peers if work.cores is not None]
    if own is not None and own.cores is not None and cores and evidence.report.plan.get("device") != "cuda":
        used = max((own.cores - median(cores)) * evidence.step_seconds / additional, 0.0)
    data_seconds = own.data_seconds if own is not None else None
    if event["phase"] == "waiting for data" or (data_seconds or 0.0) > additional / 2:
        if median([work.data_seconds or 0.0 for work in peers] or [0.0]) >= MIN_SHARE * evidence.step_seconds:
            return None  # all wait for data, some longer than others
        if used is not None and used >= MIN_WORKING_CORES:
            texts.append(f"in the additional time it uses {used:.2f} processors")
            cause = "waits for the work on its samples: decoding, tokenizing, augmentation"
            change = "compare the lengths of its samples with those of its peers; raise data.workers"
        elif own is not None and (disk_text := _disk_wait_text(evidence, own)):
            if rank == 0:
                return None  # its waits are in the records of the steps
            title = f"all ranks wait for rank {rank}, which waits for the store of its data"
            change = "move the data to a faster disk or to memory; look for other programs that use the disk"
            share = min(additional / evidence.step_seconds, 1.0)
            return Finding("slow_store", "slow", title, (*texts, disk_text), change, share)
        else:
            cause, change = "waits for its data", "look at the store and the disk of that node"
    elif used is not None and used < MIN_WORKING_CORES:
        texts.append(f"in the additional time it uses {used:.2f} processors")
        cause = "does not get its processors: a limit, or another program on its node"
        change = "find the other program, or the limit (cpu.max of its control group)"
    else:
        faults = _gpu_faults(evidence, rank, [work.rank for work in peers])
        texts += [text for text, _ in faults]
        cause, change = faults[0] if faults else ("its device, or the size of its samples", _UNKNOWN_CHANGE)
        cause = f"computes more slowly: {cause}"
        change = f"{change}; parallel.load_balancing = 'on' moves work away"
    title = f"all ranks wait for rank {rank}, which {cause}"
    return Finding("straggler", "slow", title, tuple(texts), change, additional / evidence.step_seconds)


def _disk_wait_text(evidence: Evidence, work: RankWork) -> str:
    """Return the evidence that a rank waits for a disk of its node; empty: there is none.

    A disk that is too slow for all ranks of a node may serve some of them first, and these do not wait.
    """
    disk = evidence.disks.get(work.node)
    if disk is None or not work.data_seconds:
        return ""
    waited = disk.waiting_share * (evidence.step_seconds or 0.0)
    if disk.waiting_share < MIN_DISK_WAIT_SHARE or waited < MIN_DISK_WAIT_RATIO * work.data_seconds:
        return ""
    text = f"programs on node {work.node} wait for a disk {percent_text(disk.waiting_share)} of the time"
    return f"{text}; {bytes_text(disk.read_bytes_per_second)} a second are read"


def _gpu_faults(evidence: Evidence, rank: int, peers: Sequence[int]) -> list[tuple[str, str]]:
    """Return the faults of a rank's GPU with the change to make, the gravest first."""
    readings = evidence.gpu_readings(rank)
    if not readings:
        return []
    newest, faults = readings[-1], []
    if xid := newest.get("xid"):
        faults.append((f"its GPU reports XID {xid}", "look the XID up in NVIDIA's list; replace the node"))
    if errors := newest.get("ecc_errors"):
        text = f"memory errors of its GPU that were not corrected: {errors:,}"
        faults.append((text, "reset or replace the GPU"))
    throttled = fmean(bool(gpu.get("is_throttled")) for gpu in readings)
    if throttled >= MIN_THROTTLED_SHARE:
        text = f"its GPU is throttled in {percent_text(throttled)} of the readings"
        text += f", at {newest['celsius']:.0f} °C" if newest.get("celsius") is not None else ""
        faults.append((text, "look at cooling and power supply of its node (`nvidia-smi -q -d PERFORMANCE`)"))
    clock, *clocks = (_clock(evidence.gpu_readings(one)) for one in (rank, *peers))
    known = [value for value in clocks if value is not None]
    if clock is not None and known and clock < SLOW_CLOCK_RATIO * median(known):
        text = f"its GPU's clock is {clock / 1e9:.2f} GHz, that of its peers' {median(known) / 1e9:.2f} GHz"
        faults.append((text, "look at its power limit and application clocks (`nvidia-smi -q -d CLOCK`)"))
    return faults


def _clock(readings: Sequence[Mapping[str, Any]]) -> float | None:
    clocks = [gpu["clock_hertz"] for gpu in readings if gpu.get("clock_hertz") is not None]
    return median(clocks) if clocks else None
