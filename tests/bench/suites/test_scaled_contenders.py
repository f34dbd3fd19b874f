"""Equal threads of the contenders of a scaling."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.bench.suites import scaled_contenders
from wanma.bench.suites.scaled_contenders import THREADS
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.job.cluster import Cluster, NodeGroup

JOB = """
[model]
preset = "gpt-1m"
[data]
text = ["stdlib"]
[train]
steps = 10
global_batch = 8
[cluster]
device = "cpu"
"""


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeGroup("node", cores=8, memory_bytes=1 << 30, devices=())
    monkeypatch.setattr(scaled_contenders, "discover_node", lambda: Cluster((node,)))


def threads(folder: Path, *over: str, overrides: tuple[str, ...] = ()) -> list[str | None]:
    path = folder / "job.toml"
    path.write_text(JOB)
    suite, _ = read_suite_or_job(path, over=over, overrides=overrides)
    return [contender.settings.get(THREADS) for contender in suite.contenders]


def test_each_rank_of_a_scaling_has_as_many_threads(tmp_path: Path) -> None:
    assert threads(tmp_path, "parallel.dp_replicate=1,2,4") == ["2", "2", "2"]
    assert threads(tmp_path, "parallel.dp_replicate=1,16") == ["1", "1"], "beyond the cores: one"


def test_each_precision_has_a_scaling_with_the_same_threads(tmp_path: Path) -> None:
    assert threads(tmp_path, "parallel.dp_replicate=1,2,4", "train.precision=fp32,bf16") == ["2"] * 6


def test_threads_of_the_user_stay(tmp_path: Path) -> None:
    over = "parallel.dp_replicate=1,2"
    assert threads(tmp_path, over, overrides=("cluster.threads_per_rank=3",)) == ["3", "3"]
    assert threads(tmp_path, over, "cluster.threads_per_rank=1,4") == ["1", "4", "1", "4"]


@pytest.mark.parametrize(
    "over",
    [
        ["train.precision=fp32,bf16"],
        ["parallel.dp_replicate=1,2", "cluster.engine=ssh"],
        ["parallel.dp_replicate=2", "parallel.tp=1"],
    ],
    ids=["the same ranks", "another place", "one contender"],
)
def test_other_contenders_keep_their_threads(tmp_path: Path, over: list[str]) -> None:
    assert set(threads(tmp_path, *over)) == {None}
