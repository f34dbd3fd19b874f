"""Command lines of torchrun, with its name replaced by `wanma launch`."""

from __future__ import annotations

import argparse
import os
import shlex

import pytest

from wanma.cli.parser import build_parser, parse
from wanma.cli.torchrun_arguments import read_torchrun_arguments
from wanma.job.errors import JobError


def read(line: str) -> argparse.Namespace:
    arguments = parse(build_parser(), ["launch", *shlex.split(line), "train.py", "--tee", "1"])
    read_torchrun_arguments(arguments)
    assert (arguments.script, arguments.arguments) == ("train.py", ["--tee", "1"])
    return arguments


def test_one_node_meets_nobody() -> None:
    for line in (
        "--standalone --rdzv-endpoint=localhost:0",
        "--rdzv_backend c10d --rdzv_endpoint=localhost:0",
    ):
        arguments = read(f"--nnodes=1 --nproc_per_node 2 {line} --rdzv-id=7 --rdzv-conf timeout=900")
        assert (arguments.ranks, arguments.nodes, arguments.rendezvous) == (2, "1", None)


def test_options_of_torchrun_s_processes_and_logs_are_accepted() -> None:
    arguments = read(
        "--nproc-per-node=2 --no-python --start-method spawn --monitor_interval 1 -r 3 -t 3 --log-dir l"
    )
    assert arguments.ranks == 2


@pytest.mark.parametrize(
    ("line", "nodes", "rendezvous"),
    [
        ("--nnodes=2 --master-addr=10.0.0.1", "2", "10.0.0.1:29500"),
        ("--nnodes=2 --master_addr 10.0.0.1 --master_port 4000", "2", "10.0.0.1:4000"),
        ("--nnodes=1:4 --rdzv-endpoint=10.0.0.1:4000", "1..4", "10.0.0.1:4000"),
        ("--nnodes=2:2 --rdzv-endpoint=10.0.0.1:4000", "2", "10.0.0.1:4000"),
        ("--nnodes=1 --master-addr=10.0.0.1", "1", None),
    ],
)
def test_the_address_of_the_nodes_is_their_rendezvous(line: str, nodes: str, rendezvous: str | None) -> None:
    arguments = read(f"--nproc-per-node=2 {line}")
    assert (arguments.nodes, arguments.rendezvous) == (nodes, rendezvous)


def test_ranks_are_counted_from_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("--nproc-per-node=cpu").ranks == os.cpu_count()
    for found, ranks in ((0, os.cpu_count()), (3, 3)):
        monkeypatch.setattr("torch.cuda.device_count", lambda found=found: found)
        assert read("--nproc-per-node=auto").ranks == ranks
        assert read("--ranks auto").ranks == ranks
    assert read("--nproc-per-node=gpu").ranks == 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(JobError, match="--nproc-per-node gpu"):
        read("--nproc-per-node=gpu")
    with pytest.raises(JobError, match="slurm"):
        read("--nproc-per-node=gpu --engine slurm")


def test_words_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(JobError, match="--standalone"):
        read("--nnodes=2 --standalone")
    with pytest.raises(JobError, match=r"10\.0\.0\.1:4000"):
        read("--nnodes=2 --rdzv-endpoint=10.0.0.2:4000 --master-addr=10.0.0.1 --master-port=4000")
