"""Cores and memory are what cgroups leave, in both versions and inside containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.git import write
from wanma.job.run.resource_limits import (
    count_oom_kills,
    cpu_model,
    memory_left_bytes,
    usable_cores,
    usable_memory_bytes,
)

CORES = len(os.sched_getaffinity(0))


def test_without_cgroups_all_cores_of_the_affinity_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == CORES


def test_a_v2_quota_is_rounded_down_and_never_below_one(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "50000 100000\n"})
    assert usable_cores(tmp_path) == 1


def test_an_unlimited_v2_group_limits_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod\n", "sys/fs/cgroup/pod/cpu.max": "max 100000\n"})
    assert usable_cores(tmp_path) == CORES


def test_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/pod\n",
        "sys/fs/cgroup/slice/pod/cpu.max": "max 100000\n",
        "sys/fs/cgroup/slice/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/slice/pod/memory.max": "max\n",
        "sys/fs/cgroup/slice/memory.max": "1048576\n",
        "sys/fs/cgroup/slice/memory.current": "900000\n",
        "sys/fs/cgroup/slice/memory.stat": "anon 700000\ninactive_file 150000\n",
    }
    write(tmp_path, files)
    assert usable_cores(tmp_path) == 1
    assert usable_memory_bytes(tmp_path) == 1048576
    assert memory_left_bytes(tmp_path) == 1048576 - 900000 + 150000


def test_a_v1_quota_is_found_at_the_mount_when_the_path_is_the_host_s(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "629145600\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "629145500\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50\n",
    }
    write(tmp_path, files)
    assert usable_cores(tmp_path) == 1
    assert usable_memory_bytes(tmp_path) == 629145600
    assert memory_left_bytes(tmp_path) == 150


def test_the_v1_numbers_for_no_limit_limit_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    write(tmp_path, files)
    assert usable_cores(tmp_path) == CORES
    assert usable_memory_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


V1_COUNT = "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, None),
        ({"proc/vmstat": "pgfault 9\noom_kill 4\n"}, 4),
        (
            {
                "proc/self/cgroup": "0::/pod\n",
                "sys/fs/cgroup/pod/memory.events": "max 3\noom 2\noom_kill 1\noom_group_kill 0\n",
                "proc/vmstat": "oom_kill 4\n",
            },
            1,
        ),
        (
            {"proc/self/cgroup": "4:memory:/pod\n", "sys/fs/cgroup/memory/pod/memory.oom_control": V1_COUNT},
            7,
        ),
        (
            {"proc/self/cgroup": "4:memory:/docker/a\n", "sys/fs/cgroup/memory/memory.oom_control": V1_COUNT},
            7,
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "oom_kill 4\n"}, 4),
    ],
    ids=["unknown", "machine", "v2", "v1", "v1 container", "v2 root"],
)
def test_the_killer_s_count_is_the_group_s_or_the_machine_s(
    tmp_path: Path, files: dict[str, str], kills: int | None
) -> None:
    write(tmp_path, files)
    assert count_oom_kills(tmp_path) == kills


@pytest.mark.parametrize(
    ("cpuinfo", "model"),
    [("processor : 0\nmodel name\t: Fast CPU @ 3 GHz\n", "Fast CPU @ 3 GHz"), ("", os.uname().machine)],
)
def test_the_processor_s_name_is_read_or_is_the_architecture(
    tmp_path: Path, cpuinfo: str, model: str
) -> None:
    write(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert cpu_model(tmp_path) == model
