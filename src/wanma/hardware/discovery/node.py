"""Discovery of this node without torch: cores, memory, GPUs and network, as a `Cluster` of one node.

GPUs come from NVML where its Python package is installed, else from `nvidia-smi`, else there are
none. Takes milliseconds on a node without a GPU, so every command can afford it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.hardware.catalogue.lookup import find_by_driver_name
from wanma.hardware.cluster_file.node_builder import (
    MAX_NIC_GIGABITS,
    MAX_NICS,
    Nics,
    inter_node_levels,
    intra_node_levels,
)
from wanma.hardware.measurement.cpu_peak import read_cpu_peak, read_memory_rate
from wanma.job.cluster import Cluster, Device, NodeGroup
from wanma.job.errors import WanmaError
from wanma.job.run.resource_limits import ROOT, cpu_model, usable_cores, usable_memory_bytes

MEBIBYTE = 2**20
NVIDIA_SMI_TIMEOUT_SECONDS = 30
"""Timeout of `nvidia-smi`: without persistence mode the driver is loaded on demand, seconds per GPU."""


def discover_node(environment: Mapping[str, str] = os.environ) -> Cluster:
    """Return this node as a cluster of one; its devices are the GPUs that a process here would see.

    Args:
        environment: the environment variables; `CUDA_VISIBLE_DEVICES` is honored as CUDA does.

    Raises:
        WanmaError: there is an NVIDIA driver, and it does not answer.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    hidden = setting is not None and setting.strip() in ("", "-1")
    gpus = [] if hidden else select_visible(list_gpus(), setting)
    devices = tuple(gpu.device for gpu in gpus)
    cores, memory_bytes = usable_cores(), usable_memory_bytes()
    kinds = {find_by_driver_name(device.name) for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else None
    cards = detect_nics()
    node = NodeGroup(
        name=socket.gethostname(),
        cores=cores,
        memory_bytes=memory_bytes,
        devices=devices,
        inside=intra_node_levels(kind) if kind else (),
        network=inter_node_levels(cards, len(devices) or 1, kind),
        nics=cards.count if cards else 0,
        nic_bytes_per_second=cards.bytes_per_second if cards else None,
        cpu=_cpu_device(cores, memory_bytes),
    )
    return Cluster(nodes=(node,))


def _cpu_device(cores: int, memory_bytes: int) -> Device:
    """Return the usable share of this node's processors as a device, with measured rates if there are any."""
    name = cpu_model()
    kind = find_by_driver_name(name)
    catalogue_device = kind.to_processor(cores, memory_bytes) if kind and kind.cores else None
    # Whole numbers survive being written to a cluster file.
    measured_peak = {key: float(round(rate)) for key, rate in read_cpu_peak(cores).items()}
    memory_rate = read_memory_rate(cores)
    device = catalogue_device or Device("cpu", name, memory_bytes, {})
    return replace(
        device,
        peak_flops_per_second=measured_peak or device.peak_flops_per_second,
        bandwidth_bytes_per_second=(
            device.bandwidth_bytes_per_second if memory_rate is None else float(round(memory_rate))
        ),
    )


@dataclass(frozen=True)
class DiscoveredGpu:
    """GPU with the UUID by which `CUDA_VISIBLE_DEVICES` may name it."""

    uuid: str
    device: Device


def list_gpus() -> list[DiscoveredGpu]:
    """List every GPU of the node, in the driver's order."""
    try:
        import pynvml
    except ImportError:
        return _gpus_from_nvidia_smi()
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError as error:
        raise _driver_error(str(error)) from error
    try:
        return [_gpu_from_nvml(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise _driver_error(str(error)) from error
    finally:
        pynvml.nvmlShutdown()


def select_visible(gpus: list[DiscoveredGpu], cuda_visible_devices: str | None) -> list[DiscoveredGpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES=setting` leaves, in its order.

    As in CUDA: unset means all, entries are numbers or beginnings of UUIDs, and the first entry that
    names no GPU ends the list.
    """
    if cuda_visible_devices is None:
        return gpus
    visible: list[DiscoveredGpu] = []
    for entry in (part.strip() for part in cuda_visible_devices.split(",")):
        if entry.isdigit():
            matches = gpus[int(entry) : int(entry) + 1]
        else:
            matches = [gpu for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1 or matches[0] in visible:
            break
        visible.append(matches[0])
    return visible


def _gpu_from_nvml(pynvml, index: int) -> DiscoveredGpu:  # type: ignore[no-untyped-def]  # an untyped module
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
    try:
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError_NotSupported:  # one memory for CPU and GPU
        memory_bytes = usable_memory_bytes()
    return DiscoveredGpu(uuid, _device(name, memory_bytes))


def _gpus_from_nvidia_smi() -> list[DiscoveredGpu]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _driver_error(f"no answer within {NVIDIA_SMI_TIMEOUT_SECONDS} s") from error
    output = (answer.stdout + answer.stderr).strip()
    if "No devices were found" in output or "couldn't communicate with the NVIDIA driver" in output:
        return []  # the tool came with an image or a package; there is no GPU or no driver below it
    if answer.returncode != 0:
        raise _driver_error(output.splitlines()[-1] if output else f"exit code {answer.returncode}")
    gpus = []
    for line in answer.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or not fields[0].startswith("GPU-"):
            continue  # a warning, as of a corrupted infoROM
        uuid, name, mebibytes = fields
        has_shared_memory = not mebibytes.isdigit()  # "[N/A]": one memory for CPU and GPU
        memory_bytes = usable_memory_bytes() if has_shared_memory else int(mebibytes) * MEBIBYTE
        gpus.append(DiscoveredGpu(uuid, _device(name, memory_bytes)))
    return gpus


def _device(name: str, memory_bytes: int) -> Device:
    kind = find_by_driver_name(name)
    if kind is None:
        return Device("cuda", name, memory_bytes, {})
    return replace(kind.to_device(), name=name, memory_bytes=memory_bytes)


def _driver_error(reason: str) -> WanmaError:
    return WanmaError(
        f"the NVIDIA driver of this node does not answer: {reason}",
        "run `nvidia-smi`; reload the driver or reboot, or train on the CPU with cluster.device=cpu "
        "and CUDA_VISIBLE_DEVICES= (empty)",
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---------------------------------------------------------------- network cards


def detect_nics(root: Path = ROOT) -> Nics | None:
    """Return the fastest cards that are up, since a run uses those; None: no card reports its speed.

    Args:
        root: root of the file system that holds `sys`.
    """
    rates = list(_rdma_speeds(root)) or list(_ethernet_speeds(root))
    valid_rates = [rate for rate in rates if 0 < rate <= MAX_NIC_GIGABITS * 1e9]
    if not valid_rates:
        return None
    fastest = max(valid_rates)
    return Nics(min(valid_rates.count(fastest), MAX_NICS), fastest)


def _rdma_speeds(root: Path) -> Iterator[float]:
    """Yield the bits per second of every active InfiniBand or RoCE port: '200 Gb/sec (4X HDR)'."""
    for port in root.glob("sys/class/infiniband/*/ports/*"):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
        if rate and "ACTIVE" in _read(port / "state"):
            yield float(rate[1]) * 1e9


def _ethernet_speeds(root: Path) -> Iterator[float]:
    """Yield the bits per second of every physical Ethernet card that is up; bridges have no device."""
    for interface in root.glob("sys/class/net/*"):
        speed = _read(interface / "speed").strip()  # megabits; -1 when unknown, unreadable when down
        if (interface / "device").exists() and speed.isdigit():
            yield int(speed) * 1e6


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
