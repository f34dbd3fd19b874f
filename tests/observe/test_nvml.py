"""GPUs as NVIDIA's own binding reads them, from a driver library that the test builds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "support" / "native" / "nvml.cpp"
PROGRAM = """
import json
from dataclasses import asdict
from wanma.observe.metrics.gpu import open_gpu_reader
reader = open_gpu_reader()
print(json.dumps([asdict(reading) for reading in reader.read()]))
reader.close()
"""


@pytest.mark.full(always=True)
def test_readings_are_those_of_the_driver(tmp_path: Path) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    (tmp_path / "readings").write_text("87 64 3 79")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "NVML_READINGS": str(tmp_path / "readings"),
    }
    output = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment)
    first, second = json.loads(output)
    assert first == {
        "utilization": 0.87, "celsius": 71, "is_throttled": True, "memory_bytes": 20 << 30,
        "total_memory_bytes": 80 << 30, "power_watts": 412.5, "clock_hertz": 1.755e9, "ecc_errors": 3,
        "xid": 79,
    }  # fmt: skip
    assert set(second.values()) == {None}
