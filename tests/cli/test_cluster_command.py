"""`wanma cluster`: what it prints is a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.cli.main import main
from wanma.hardware.catalogue.lookup import CATALOGUE
from wanma.hardware.cluster_file.reader import load_cluster_file
from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.hardware.discovery.node import discover_node


def test_it_prints_this_machine_as_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster"]) == 0
    path = tmp_path / "cluster.toml"
    path.write_text(capsys.readouterr().out)
    (node,), (here,) = load_cluster_file(path).nodes, discover_node().nodes
    assert (node.name, node.cores, node.memory_bytes) == (here.name, here.cores, here.memory_bytes)


def test_it_prints_a_line_as_a_cluster_file_and_a_file_as_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", "8x8 H100 SXM, 4x100G"]) == 0
    path = tmp_path / "cluster.toml"
    text = capsys.readouterr().out
    path.write_text(text)
    assert load_cluster_file(path) == parse_shorthand("8x8 H100 SXM, 4x100G")
    assert main(["cluster", str(path)]) == 0
    assert capsys.readouterr().out == text


def test_it_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "--devices"]) == 0
    text = capsys.readouterr().out
    assert all(kind.name in text for kind in CATALOGUE)
    assert "989.5" in text


def test_a_wrong_cluster_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "8x8 H100 SMX"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "error: 'H100 SMX' is not in the device catalogue. Did you mean 'H100 SXM'?\n"
    )
