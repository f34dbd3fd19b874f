"""Checks of `wanma doctor`: findings about this node, missing parts, and remedies.

Each check examines one thing and returns findings. The node stays as it is, except for a file
that is written and removed to time the disk, and for the user's cache folder: the measured CPU
peaks, and the compiled code of collectives.
torch is imported inside the checks, so that other commands stay fast.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from wanma.hardware.discovery.network_interfaces import (
    INTERFACE_VARIABLES,
    NetworkRoute,
    default_routes,
    list_interfaces,
    loopback_hostname,
)
from wanma.hardware.discovery.node import discover_node, list_gpus
from wanma.hardware.measurement.cpu_peak import cpu_peak_file, measure_cpu_peak, read_memory_rate
from wanma.hardware.measurement.run_times import disk_write_run, mean_run_seconds
from wanma.hardware.native.cpp_compiler import find_cpp_compiler
from wanma.hardware.native.instruction_sets import find_carried_library
from wanma.hardware.native.native_library import COLLECTIVES_SOURCE, find_or_build_library
from wanma.job.cluster import Device
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import cpu_model, usable_cores, usable_memory_bytes
from wanma.torch_internals.versions import (
    FIRST_TORCH_VERSION,
    NEWEST_TRIED_TORCH_VERSION,
    parse_version,
    untried_version_note,
    version_text,
)

NO_TORCH_MESSAGE = "torch is not installed"
INSTALL_TORCH_HINT = f"pip install 'torch>={version_text(FIRST_TORCH_VERSION)}'"
MIN_SHARED_MEMORY_BYTES = 2**30
MIN_FREE_DISK_BYTES = 10 * 2**30
MIN_DISK_BYTES_PER_SECOND = 100 * 10**6
WRITE_PROBE_BYTES = 32 * 2**20
DISK_PROBE_SECONDS = 0.1

EXTRAS = {
    "tensorboard": ("tensorboard", "TensorBoard files"),
    "gpu": ("pynvml", "GPU utilization and power"),
    "yaml": ("yaml", "job files in YAML"),
}
"""Optional extra → (module that proves its presence, purpose)."""


@dataclass(frozen=True)
class CheckResult:
    """Line of the doctor's report."""

    name: str
    status: Literal["ok", "warn", "missing"]
    text: str
    remedy: str = ""
    """Remedy; empty: none is needed."""


def run_checks(runs_folder: Path = Path("runs")) -> list[CheckResult]:
    """Run every check; takes a few seconds, most of it importing torch.

    Args:
        runs_folder: the folder where runs would go; it need not exist.
    """
    checks: tuple[Callable[[], CheckResult | list[CheckResult]], ...] = (
        _check_python,
        _check_torch,
        _check_gpus,
        _check_cores,
        _check_cpu_peak,
        _check_memory,
        _check_compiler,
        _check_backends,
        _check_shared_memory_collectives,
        _check_network,
        _check_gloo_loopback,
        lambda: _check_disk(runs_folder),
        _check_shared_memory,
        _check_allocator,
        _check_extras,
    )
    findings: list[CheckResult] = []
    for check in checks:
        results = check()
        findings.extend(results if isinstance(results, list) else [results])
    return findings


def _check_python() -> CheckResult:
    return CheckResult("python", "ok", f"{platform.python_version()}, {sys.executable}")


def _check_torch() -> CheckResult:
    try:
        import torch
    except ImportError as error:
        return CheckResult("torch", "missing", f"cannot be imported: {error}", INSTALL_TORCH_HINT)
    first, newest = version_text(FIRST_TORCH_VERSION), version_text(NEWEST_TRIED_TORCH_VERSION)
    if parse_version(torch.__version__) < FIRST_TORCH_VERSION:
        return CheckResult(
            "torch",
            "warn",
            f"{torch.__version__}: older than {first}, the first supported",
            INSTALL_TORCH_HINT,
        )
    if (note := untried_version_note(torch.__version__)) is not None:
        return CheckResult("torch", "warn", note)
    return CheckResult("torch", "ok", f"{torch.__version__} (tested: {first} to {newest})")


def _check_gpus() -> list[CheckResult]:
    try:
        devices = discover_node().nodes[0].devices
        hidden = len(list_gpus()) - len(devices)
    except WanmaError as error:
        return [CheckResult("GPUs", "warn", error.message, error.hint)]
    findings = [_check_gpu(index, device) for index, device in enumerate(devices)]
    if hidden > 0:
        text = f"{hidden} hidden by CUDA_VISIBLE_DEVICES"
        findings.append(CheckResult("GPUs", "warn", text, "unset CUDA_VISIBLE_DEVICES to use all GPUs"))
    if not findings:
        return [CheckResult("GPUs", "ok", "none: runs use the CPU with Gloo")]
    return [*findings, *_check_torch_gpus(len(devices))]


def _check_gpu(index: int, device: Device) -> CheckResult:
    text = f"{device.name}, {device.memory_bytes / 2**30:.0f} GiB"
    peak = device.peak_flops_per_second
    if not peak:
        advice = "not in the device catalogue; MFU is not reported"
        return CheckResult(f"GPU {index}", "warn", text, advice)
    best = "bf16" if "bf16" in peak else "fp16"
    return CheckResult(f"GPU {index}", "ok", f"{text}, {peak[best] / 1e12:,.0f} TFLOP/s {best}")


def _check_torch_gpus(count: int) -> list[CheckResult]:
    """Check that torch sees every GPU: a torch not built for the driver is the commonest mistake."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() == count:
        return []
    visible_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cuda_version = torch.version.cuda or "no CUDA"
    advice = "install a torch built for this driver: https://pytorch.org/get-started/locally"
    return [
        CheckResult(
            "torch and GPUs",
            "warn",
            f"torch (built for {cuda_version}) sees {visible_count} of {count} GPUs",
            advice,
        )
    ]


def _check_cores() -> CheckResult:
    usable_count, total_count = usable_cores(), os.cpu_count() or 1
    text = f"{usable_count} usable, {cpu_model()}"
    if usable_count < total_count:
        text += f" of {total_count} on this node, limited by CPU affinity or a cgroup quota"
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) > usable_count:
        advice = f"unset OMP_NUM_THREADS={threads}: more threads than cores slow every step"
        return CheckResult("cores", "warn", text, advice)
    return CheckResult("cores", "ok", text)


def _check_cpu_peak() -> CheckResult:
    """Measure the CPU peak for every equal share of the cores, so that runs on it can state their MFU."""
    if importlib.util.find_spec("torch") is None:
        return CheckResult("CPU peak", "missing", NO_TORCH_MESSAGE, INSTALL_TORCH_HINT)
    cores = usable_cores()
    try:
        for threads in range(1, cores + 1):
            if cores % threads == 0:
                peak = measure_cpu_peak(threads)
    except WanmaError as error:
        return CheckResult("CPU peak", "warn", error.message, error.hint)
    rates = ", ".join(f"{precision} {rate / 1e9:,.0f}" for precision, rate in peak.items())
    text = f"{rates} GFLOP/s, memory {(read_memory_rate(cores) or 0.0) / 1e9:,.0f} GB/s on {cores} threads"
    return CheckResult("CPU peak", "ok", f"{text}; kept in {cpu_peak_file()}")


def _check_memory() -> CheckResult:
    return CheckResult("memory", "ok", f"{usable_memory_bytes() / 2**30:.1f} GiB usable")


def _check_compiler() -> CheckResult:
    compiler = find_cpp_compiler()
    if compiler is None:
        advice = "apt-get install g++ (or your system's); without it parallel.compile is off on the CPU"
        if find_carried_library(COLLECTIVES_SOURCE) is None:
            advice += ", and collectives go through Gloo"
        return CheckResult("C++ compiler", "missing", "none found", advice)
    return CheckResult("C++ compiler", "ok", compiler)


def _check_shared_memory_collectives() -> CheckResult:
    """Check that ranks of this node can share memory; compile the library for it if necessary."""
    name = "collectives within a node"
    library = find_or_build_library(COLLECTIVES_SOURCE)
    if library.path is None:
        remedy = library.hint or "apt-get install g++"
        return CheckResult(name, "warn", f"Gloo, over TCP: {library.failure_reason}", remedy)
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        advice = "use Linux 5.3 or later"
        return CheckResult(
            name, "warn", "Gloo, over TCP: memfd_create or pidfd_open is not available", advice
        )
    origin = "compiled on this node"
    if library.path == find_carried_library(COLLECTIVES_SOURCE):
        origin = f"carried by the wheel for {library.path.parent.name}"
    return CheckResult(name, "ok", f"shared memory (parallel.collectives), {origin}")


def _check_backends() -> CheckResult:
    if importlib.util.find_spec("torch") is None:
        return CheckResult("collectives", "missing", NO_TORCH_MESSAGE, INSTALL_TORCH_HINT)
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        text = "this torch was built without Gloo, which wanma requires"
        return CheckResult("collectives", "missing", text, INSTALL_TORCH_HINT)
    return CheckResult("collectives", "ok", f"Gloo yes, NCCL {'yes' if dist.is_nccl_available() else 'no'}")


def _check_network() -> list[CheckResult]:
    """Check the interfaces, the default route, and the environment variables that override it."""
    interfaces = list_interfaces()
    active_interfaces = [interface for interface in interfaces if interface.is_up and interface.addresses]
    if not active_interfaces:
        advice = "bring up the loopback: ip link set lo up"
        return [CheckResult("network", "missing", "no interface is up", advice)]
    findings = [
        CheckResult(
            "network",
            "ok",
            ", ".join(f"{interface.name} {' '.join(interface.addresses)}" for interface in active_interfaces),
        )
    ]
    if routes := default_routes(interfaces):
        text = f"{routes[0]}; a run takes the route to cluster.rendezvous"
        findings.append(
            CheckResult(
                "multi-node network", "ok", text, "set cluster.network_interface to choose another interface"
            )
        )
    return [
        *findings,
        *_check_network_variables({interface.name for interface in interfaces}, os.environ),
        *_check_hostname_address(routes),
    ]


def _check_network_variables(
    interface_names: Collection[str], environment: Mapping[str, str]
) -> list[CheckResult]:
    """Check that interfaces named in the environment exist: they take precedence over wanma's choice."""
    findings = []
    for name in INTERFACE_VARIABLES:
        value = environment.get(name, "")
        # NCCL's values are prefixes of names, or exact after '=', or excluded after '^'.
        names = (
            [] if value.startswith("^") else [word.strip() for word in value.lstrip("=").split(",") if word]
        )
        missing = [
            prefix
            for prefix in names
            if not any(interface_name.startswith(prefix) for interface_name in interface_names)
        ]
        if missing:
            advice = f"unset {name}, or name one of: {', '.join(sorted(interface_names))}"
            text = f"{name}={value}, but this node has no interface {' or '.join(missing)}"
            findings.append(CheckResult("multi-node network", "warn", text, advice))
    return findings


def _check_hostname_address(routes: Sequence[NetworkRoute]) -> list[CheckResult]:
    """Check the address of this node's own name: Debian gives it one that other nodes cannot reach."""
    found = loopback_hostname()
    if found is None:
        return []
    name, address = found
    if not routes:
        advice = "set cluster.rendezvous to an address rather than to the host name of this node"
        text = f"{name} resolves to {address} on this node, which other nodes cannot reach"
        return [CheckResult("host name", "ok", text, advice)]
    text = (
        f"{name} resolves to {address} on this node, which other nodes cannot reach; as cluster.rendezvous "
        f"it is replaced by {routes[0].address}"
    )
    return [CheckResult("host name", "ok", text)]


def _check_gloo_loopback() -> CheckResult:
    if importlib.util.find_spec("torch") is None:
        return CheckResult("Gloo on loopback", "missing", NO_TORCH_MESSAGE, INSTALL_TORCH_HINT)
    problem = probe_gloo_loopback()
    if problem:
        advice = "check that 127.0.0.1 is up and that no firewall blocks it, or set cluster.network_interface"
        return CheckResult("Gloo on loopback", "warn", problem, advice)
    return CheckResult("Gloo on loopback", "ok", "two ranks reduced a tensor")


def _check_disk(runs: Path) -> CheckResult:
    folder = runs.absolute()
    while not folder.is_dir():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    try:
        write = disk_write_run(folder, WRITE_PROBE_BYTES)
        rate = WRITE_PROBE_BYTES / mean_run_seconds(write, DISK_PROBE_SECONDS)
    except OSError as error:
        reason = f"cannot write to {folder}: {error.strerror or error}"
        return CheckResult("disk", "warn", reason, "choose another folder with --run-dir DIR or observe.runs")
    text = f"{free_bytes / 2**30:.0f} GiB free, writes {rate / 1e6:,.0f} MB/s in {folder}"
    if free_bytes < MIN_FREE_DISK_BYTES:
        return CheckResult("disk", "warn", text, "free space, or lower checkpoint.keep")
    if rate < MIN_DISK_BYTES_PER_SECOND:
        return CheckResult(
            "disk", "warn", text, "put runs on a faster disk: checkpoints are slow on this one"
        )
    return CheckResult("disk", "ok", text)


def _check_shared_memory() -> CheckResult:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return CheckResult(
            "shared memory", "missing", "there is no /dev/shm", "mount it: mount -t tmpfs tmpfs /dev/shm"
        )
    usage = shutil.disk_usage(folder)
    text = f"/dev/shm {usage.total / 2**30:.1f} GiB, {usage.free / 2**30:.1f} GiB free"
    if usage.total < MIN_SHARED_MEMORY_BYTES:
        return CheckResult("shared memory", "warn", text, "in Docker: --shm-size=8g or --ipc=host")
    return CheckResult("shared memory", "ok", text)


def _check_allocator() -> CheckResult:
    preloaded = os.environ.get("LD_PRELOAD", "")
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if name in preloaded:
            return CheckResult("allocator", "ok", f"{name} (LD_PRELOAD)")
    library, version = platform.libc_ver()
    if library != "glibc":
        advice = "set cluster.host_allocator = 'system': 'tuned' supports only glibc"
        return CheckResult("allocator", "warn", library or "unknown C library", advice)
    return CheckResult(
        "allocator", "ok", f"glibc {version}; workers run with cluster.host_allocator's settings"
    )


def _check_extras() -> list[CheckResult]:
    findings = []
    for extra, (module, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            advice = f"pip install 'wanma[{extra}]'"
            findings.append(CheckResult(f"extra: {extra}", "missing", f"for {purpose}", advice))
        else:
            findings.append(CheckResult(f"extra: {extra}", "ok", f"{_version(module)}, for {purpose}"))
    return findings


def _version(module: str) -> str:
    """Return name and version of the distribution that provides `module`."""
    distributions = importlib.metadata.packages_distributions().get(module, [])
    return f"{distributions[0]} {importlib.metadata.version(distributions[0])}" if distributions else module


GLOO_TIMEOUT_SECONDS = 20


def probe_gloo_loopback() -> str:
    """Reduce one tensor between two Gloo ranks over 127.0.0.1; return the error, empty on success.

    The ranks are two threads of this process, because process groups as objects need no global state.
    """
    import torch
    import torch.distributed

    from wanma.torch_internals.distributed import make_gloo_group

    dist: Any = torch.distributed  # its stores are untyped
    store = dist.HashStore()
    timeout = timedelta(seconds=GLOO_TIMEOUT_SECONDS)
    sums: dict[int, float] = {}
    problems: dict[int, str] = {}

    def reduce(rank: int) -> None:
        try:
            group = make_gloo_group(store, rank, 2, "127.0.0.1", timeout)
            tensor = torch.tensor([rank + 1.0])
            group.allreduce([tensor]).wait()
            sums[rank] = tensor.item()
        except RuntimeError as error:
            problems[rank] = str(error).splitlines()[0]

    threads = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * GLOO_TIMEOUT_SECONDS)
    if problems:
        return "; ".join(f"rank {rank}: {text}" for rank, text in sorted(problems.items()))
    if any(thread.is_alive() for thread in threads):
        return f"no answer within {2 * GLOO_TIMEOUT_SECONDS} s"
    return "" if sums == {0: 3.0, 1: 3.0} else f"wrong sums: {sums}"
