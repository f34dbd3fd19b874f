"""Measurement of the rates of this node's processor, at its first use, stored for this node.

A child process measures: it imports torch, so that this process need not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from wanma.hardware.measurement.cpu_peak import cpu_peak_file, read_cpu_peak, read_memory_rate
from wanma.job.cluster import Cluster

MEASURE_CPU_VARIABLE = "WANMA_MEASURE_CPU"
"""Environment variable; `0` turns the measurement off."""
_TIMEOUT_SECONDS = 60
_PROGRAM = "from wanma.hardware.measurement.cpu_peak import measure_cpu_peak; measure_cpu_peak()"


def with_measured_cpu_peak(
    cluster: Cluster,
    report: Callable[[str], None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster:
    """Return this node with the peak rates of its processor measured: about three seconds, once.

    A catalogue has the rates of a whole processor, and a rented slice has others, above all of memory.
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
        or (cpu.peak_flops_per_second and read_memory_rate(node.cores) is not None)
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
    memory_rate = read_memory_rate(node.cores)
    if not peak or memory_rate is None:
        report(f"the rates of {cpu.name} could not be measured: {failure}")
        return cluster
    rates = ", ".join(f"{precision} {rate / 1e9:,.0f}" for precision, rate in peak.items())
    report(
        f"the rates of {cpu.name} were measured once, in {time.perf_counter() - start:.1f} s: {rates} "
        f"GFLOP/s, memory {memory_rate / 1e9:,.0f} GB/s; kept in {cpu_peak_file()}"
    )
    measured_cpu = replace(
        cpu, peak_flops_per_second=peak, bandwidth_bytes_per_second=float(round(memory_rate))
    )
    return Cluster((replace(node, cpu=measured_cpu),))
