"""Measurement of a processor that the catalogue lacks, at its first use, stored for this node.

A child process measures: it imports torch, so that this process need not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from wanma.hardware.discovery.cpu_peak import cpu_peak_file, read_cpu_peak
from wanma.job.cluster import Cluster

MEASURE_CPU_VARIABLE = "WANMA_MEASURE_CPU"
"""Environment variable; `0` turns the measurement off."""
_TIMEOUT_SECONDS = 60
_PROGRAM = "from wanma.hardware.discovery.cpu_peak import measure_cpu_peak; measure_cpu_peak()"


def with_measured_cpu_peak(
    cluster: Cluster,
    report: Callable[[str], None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster:
    """Return this node with the peak rates of an uncatalogued processor measured: about two seconds, once.

    Nodes with accelerators are returned unchanged, and so is this one if the measurement fails; `report` gets
    the reason.

    Args:
        cluster: the discovered cluster of this one node.
        report: receiver of a sentence on the measurement; default: standard error.
        environment: the environment variables, with `MEASURE_CPU_VARIABLE`.
    """
    (node,) = cluster.nodes
    cpu = node.cpu
    if (
        node.devices
        or cpu is None
        or cpu.peak_flops_per_second
        or environment.get(MEASURE_CPU_VARIABLE) == "0"
    ):
        return cluster
    report = report or (lambda text: print(text, file=sys.stderr, flush=True))
    start = time.perf_counter()
    try:
        process = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        # The last line that is not indented names the error; a way out may follow it.
        error_lines = [line for line in process.stderr.splitlines() if line and not line.startswith(" ")]
        failure = error_lines[-1] if error_lines and process.returncode else "no result was stored"
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    peak = {key: float(round(rate)) for key, rate in read_cpu_peak(node.cores).items()}
    if not peak:
        report(f"{cpu.name} is not in the device catalogue, and its peak could not be measured: {failure}")
        return cluster
    rates = ", ".join(f"{precision} {rate / 1e9:,.0f}" for precision, rate in peak.items())
    report(
        f"{cpu.name} is not in the device catalogue; its peak was measured once, in "
        f"{time.perf_counter() - start:.1f} s: {rates} GFLOP/s; kept in {cpu_peak_file()}"
    )
    return Cluster((replace(node, cpu=replace(cpu, peak_flops_per_second=peak)),))
