"""Network cards as the kernel tells them, from made-up file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import git
from wanma.hardware.cluster_file.node_builder import Nics
from wanma.hardware.discovery.node import detect_nics


def write(root: Path, files: dict[str, str]) -> Path:
    git.write(root / "sys/class", files)
    return root


def infiniband(name: str, rate: str, state: str = "4: ACTIVE") -> dict[str, str]:
    port = f"infiniband/{name}/ports/1"
    return {f"{port}/rate": f"{rate} Gb/sec (4X NDR)\n", f"{port}/state": f"{state}\n"}


def test_active_infiniband_of_the_fastest_kind_counts(tmp_path: Path) -> None:
    files = {f"net/eth0/{name}": text for name, text in (("speed", "100000\n"), ("device", ""))}
    for number in range(8):
        files |= infiniband(f"mlx5_{number}", "400")
    files |= infiniband("mlx5_8", "400", "1: DOWN") | infiniband("mlx5_9", "25")
    assert detect_nics(write(tmp_path, files)) == Nics(8, 400e9)


@pytest.mark.parametrize(
    ("speed", "device", "cards"),
    [("25000\n", True, Nics(1, 25e9)), ("-1\n", True, None), ("25000\n", False, None)],
)
def test_ethernet_counts_where_a_real_card_tells_its_speed(
    speed: str, device: bool, cards: Nics | None, tmp_path: Path
) -> None:
    files = {"net/eth0/speed": speed} | ({"net/eth0/device": ""} if device else {})
    assert detect_nics(write(tmp_path, files)) == cards


def test_a_machine_that_tells_nothing_has_unknown_cards(tmp_path: Path) -> None:
    assert detect_nics(tmp_path) is None
