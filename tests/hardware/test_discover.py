"""Discovery: from NVML, from nvidia-smi, or nothing; without torch and fast."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from wanma.hardware.discovery.node import DiscoveredGpu, discover_node, list_gpus, select_visible
from wanma.job.cluster import Device
from wanma.job.errors import WanmaError

GPUS = [DiscoveredGpu(f"GPU-{letter * 8}", Device("cuda", "NVIDIA H200", 150 << 30, {})) for letter in "abc"]


class NvmlError(Exception):
    pass


class LibraryNotFoundError(NvmlError):
    pass


class DriverNotLoadedError(NvmlError):
    pass


class NotSupportedError(NvmlError):
    pass


def fake_nvml(names: list[str], failure: Exception | None = None) -> types.ModuleType:
    """A stand-in for `pynvml` on a machine with these GPUs; the real one needs a driver."""

    def start() -> None:
        if failure is not None:
            raise failure

    module = types.ModuleType("pynvml")
    attributes = {
        "NVMLError": NvmlError,
        "NVMLError_LibraryNotFound": LibraryNotFoundError,
        "NVMLError_DriverNotLoaded": DriverNotLoadedError,
        "NVMLError_NotSupported": NotSupportedError,
        "nvmlInit": start,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: names[handle],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(total=80 << 30),
    }
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_machine_without_gpus_is_one_node_with_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], LibraryNotFoundError("no library")))
    (node,) = discover_node({}).nodes
    assert node.devices == ()
    assert node.cores >= 1
    assert node.memory_bytes > 1 << 28


def test_nvml_devices_come_with_their_catalogue_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(["NVIDIA H100 80GB HBM3", "NVIDIA Unheard Of"]))
    known, unknown = discover_node({}).nodes[0].devices
    assert known.kind == "cuda"
    assert known.memory_bytes == 80 << 30
    assert known.peak_flops_per_second["bf16"] == 989.5e12
    assert unknown.peak_flops_per_second == {}


def test_a_driver_that_fails_is_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], NvmlError("GPU is lost")))
    with pytest.raises(WanmaError, match="GPU is lost") as caught:
        discover_node({})
    assert "CUDA_VISIBLE_DEVICES=" in caught.value.hint
    assert discover_node({"CUDA_VISIBLE_DEVICES": ""}).nodes[0].devices == ()


def test_nvidia_smi_answers_where_nvml_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(
        tmp_path,
        'echo "GPU-1, NVIDIA H200, 143771"; echo "GPU-2, NVIDIA GB10, [N/A]"; '
        'echo "WARNING: infoROM is corrupted at gpu 0000:00:1E.0"',
        monkeypatch,
    )
    first, second = list_gpus()
    assert (first.uuid, first.device.name, first.device.memory_bytes) == (
        "GPU-1",
        "NVIDIA H200",
        143771 << 20,
    )
    assert second.device.memory_bytes > 0


@pytest.mark.parametrize(
    "said",
    ["No devices were found", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"],
)
def test_nvidia_smi_without_a_gpu_means_none(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_smi(tmp_path, f'echo "{said}"; exit 9', monkeypatch)
    assert list_gpus() == []


def test_nvidia_smi_that_fails_otherwise_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, 'echo "Driver/library version mismatch" >&2; exit 18', monkeypatch)
    with pytest.raises(WanmaError, match="version mismatch"):
        list_gpus()


@pytest.mark.parametrize(
    ("setting", "letters"),
    [
        (None, "abc"),
        ("1", "b"),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        ("0,7,1", "a"),
        ("0,0", "a"),
        ("GPU-", ""),
        ("", ""),
    ],
)
def test_visible_devices_are_chosen_as_cuda_chooses(setting: str | None, letters: str) -> None:
    assert "".join(gpu.uuid[4] for gpu in select_visible(GPUS, setting)) == letters


def test_discovery_imports_no_torch_and_takes_milliseconds() -> None:
    code = """
import sys, time
from wanma.hardware.discovery.node import discover_node

def seconds():
    start = time.process_time()  # the rest is what the machine does beside it
    discover_node({})
    return time.process_time() - start

sys.addaudithook(lambda event, _: waits.append(event) if event in ("time.sleep", "socket.connect") else None)
waits = []
print(min(seconds() for _ in range(5)))
assert "torch" not in sys.modules
assert not waits, waits
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(answer.stdout) < 0.05
