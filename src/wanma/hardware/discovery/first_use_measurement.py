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

from wanma.hardware.discovery.cpu_peak import peak_file, stored_cpu_peak
from wanma.job.cluster import Cluster

SWITCH = "WANMA_MEASURE_CPU"
"""Environment variable; `0` turns the measurement off."""
_LONGEST_SECONDS = 60
_PROGRAM = "from wanma.hardware.discovery.cpu_peak import measure_cpu_peak; measure_cpu_peak()"


def with_measured_processor(
    found: Cluster,
    tell: Callable[[str], None] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Cluster:
    """Return this node with the peak rates of an uncatalogued processor measured: about two seconds, once.

    Nodes with accelerators are returned unchanged, and so is this one if the measurement fails; `tell` gets
    the reason.

    Args:
        found: the discovered cluster of this one node.
        tell: receiver of a sentence on the measurement; default: standard error.
        environment: the environment variables, with `SWITCH`.
    """
    (node,) = found.nodes
    cpu = node.cpu
    if node.devices or cpu is None or cpu.peak_flops_per_second or environment.get(SWITCH) == "0":
        return found
    tell = tell or (lambda text: print(text, file=sys.stderr, flush=True))
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
        # The last line that is not indented names the error; a way out may follow it.
        said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        failure = said[-1] if said and done.returncode else "nothing was kept"
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    measured = {key: float(round(rate)) for key, rate in stored_cpu_peak(node.cores).items()}
    if not measured:
        tell(f"the rates of {cpu.name} are not in the catalogue, and could not be measured: {failure}")
        return found
    rates = ", ".join(f"{precision} {rate / 1e9:,.0f}" for precision, rate in measured.items())
    tell(
        f"the rates of {cpu.name} are not in the catalogue: measured once, in "
        f"{time.perf_counter() - began:.1f} s: {rates} GFLOP/s; kept in {peak_file()}"
    )
    return Cluster((replace(node, cpu=replace(cpu, peak_flops_per_second=measured)),))
