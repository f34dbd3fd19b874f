"""wanma launch --dry-run: what would be started, with its devices, time and price; nothing is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from support.command import Desk
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.planner.presentation.script_cost import render_script_cost

CLUSTER = """\
[[nodes]]
count = 4
device = "H100 SXM"
devices = 8
price_per_hour = 24.5
"""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path, modules=tmp_path)
    (tmp_path / "script.py").write_text("open('has-run', 'w').close()\n")
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return desk


def rows(text: str) -> dict[str, str]:
    """Return the values of the table by their names."""
    found = [line.split("  ", 1) for line in text.splitlines()]
    return {row[0]: row[1].strip() for row in found if len(row) == 2}


def check_nothing_started(desk: Desk) -> None:
    assert not (desk.folder / "has-run").exists()
    assert not (desk.folder / "runs").exists()


def test_a_start_in_the_foreground_shows_command_devices_and_price(desk: Desk) -> None:
    options = ("--dry-run", "--ranks", "2", "--set", "cluster.file=cluster.toml")
    ran = desk.call("launch", *options, "script.py", "--lr", "1").check()
    found = rows(ran.out)
    assert found["devices"].startswith("1 node of 8 × H100 SXM")
    assert "2 ranks on it" in found["devices"]
    assert found["price"] == "24.50 per hour"
    assert found["at most"] == "without bound, as there is no time limit"
    assert "no forecast: the steps of a script" in ran.out
    assert "Start of 2 ranks on this node" in ran.out
    assert "script.py --lr 1" in ran.out
    check_nothing_started(desk)


def test_nodes_multiply_the_price_and_without_a_price_it_is_unknown(desk: Desk) -> None:
    options = ("launch", "--dry-run", "--ranks", "2", "--nodes", "3")
    ran = desk.call(*options, "--set", "cluster.file=cluster.toml", "script.py").check()
    assert rows(ran.out)["price"] == "73.50 per hour"
    assert "on each of 3 nodes" in ran.out
    ran = desk.call(*options, "script.py")
    assert rows(ran.out)["price"].startswith("unknown: price_per_hour of the cluster file")
    check_nothing_started(desk)


def test_a_detached_start_shows_its_command_too(desk: Desk) -> None:
    ran = desk.call("launch", "-d", "--dry-run", "--ranks", "2", "script.py").check()
    assert "2 ranks on it" in rows(ran.out)["devices"]
    assert "Submission to local" in ran.out
    check_nothing_started(desk)


def test_a_time_limit_bounds_duration_energy_and_price() -> None:
    (group,) = read_cluster("4x8 H100 SXM, 4x100G").nodes
    console = Console(width=120, record=True)
    console.print(render_script_cost([replace(group, count=2, price_per_hour=24.5)], 8, 8, 7_200))
    found = rows(console.export_text())
    assert found["devices"].startswith("2 nodes of 8 × H100 SXM")
    assert found["devices"].endswith("8 ranks on each, with 8 GPUs")
    assert found["price"] == "49.00 per hour"
    duration, energy, price = found["at most"].removesuffix(", at the time limit of one job").split(", ")
    assert duration == "2 h 00 min"
    assert energy.endswith("kWh at the wall")
    assert 2 * 2 * 5.6 < float(energy.split()[0]) < 2 * 2 * 10.2, "between its GPUs and the node's maximum"
    assert price == "price 98.00"
