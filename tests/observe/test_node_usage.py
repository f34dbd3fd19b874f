"""Use of a node: its own memory or that of a container, and the counters of InfiniBand."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from wanma.observe.metrics import node_usage
from wanma.observe.metrics.node_usage import read_infiniband, read_node_usage


@pytest.mark.parametrize("has_limit", [True, False])
def test_a_container_s_limit_counts_instead_of_the_node_s_memory(
    has_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = psutil.virtual_memory().total
    limit, left = (1 << 30, 1 << 20) if has_limit else (total, None)
    monkeypatch.setattr(node_usage, "usable_memory_bytes", lambda: limit)
    monkeypatch.setattr(node_usage, "memory_left_bytes", lambda: left)
    usage = read_node_usage(tmp_path)
    assert usage["memory_bytes"] == limit
    if has_limit:
        assert usage["memory_available_bytes"] == left
    else:
        assert 0 < usage["memory_available_bytes"] <= total
    assert 0 < usage["disk_free_bytes"] <= usage["disk_bytes"]


def test_waits_for_disks_are_those_of_some_program_where_the_kernel_counts_them(tmp_path: Path) -> None:
    pressure = tmp_path / "io"
    assert "disk_wait_seconds" not in read_node_usage(tmp_path, pressure=pressure)
    pressure.write_text("some avg10=0.01 avg60=0.39 total=2500000\nfull avg10=0.01 avg60=0.27 total=9\n")
    assert read_node_usage(tmp_path, pressure=pressure)["disk_wait_seconds"] == 2.5


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    for port, words in (("1", ("10", "20")), ("2", ("3", ""))):  # the second reports nothing readable
        counters = tmp_path / "mlx5_0" / "ports" / port / "counters"
        counters.mkdir(parents=True)
        (counters / "port_rcv_data").write_text(f"{words[0]}\n")
        (counters / "port_xmit_data").write_text(f"{words[1]}\n")
    assert read_infiniband(tmp_path) == {"mlx5_0/1": (40, 80)}
