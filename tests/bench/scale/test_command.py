"""Command `wanma bench scale`: suites of jobs on several numbers of ranks, run and shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.bench.results.directory import list_result_directories
from wanma.bench.scale.suite import scale_suite
from wanma.bench.stored_suite import read_stored_suite
from wanma.bench.suites.suite_file import find_suite
from wanma.cli.main import main
from wanma.job.errors import WanmaError

JOB = """\
[model]
family = "decoder"
layers = 1
hidden = 64
heads = 2

[data]
text = ["stdlib"]
tokenizer = "bytes"
sequence_length = 32

[train]
steps = 4
global_batch = 8
learning_rate = 1e-3
warmup_steps = 1

[cluster]
device = "cpu"
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(JOB)
    return path


def test_each_number_of_ranks_is_a_contender_with_equal_threads(job: Path) -> None:
    suite, rule = scale_suite(job, {"measure": [1, 2, 4]}, overrides=["train.steps=5"], steps=3)
    assert [one.name for one in suite.contenders] == ["dp_replicate=1", "dp_replicate=2", "dp_replicate=4"]
    assert suite.file.baseline == "dp_replicate=1"
    assert rule.steps == 3
    threads = {one.settings["cluster.threads_per_rank"] for one in suite.contenders}
    assert len(threads) == 1
    assert [one.settings["parallel.dp_replicate"] for one in suite.contenders] == ["1", "2", "4"]
    assert {one.settings["train.steps"] for one in suite.contenders} == {"5"}
    assert not any("train.global_batch" in one.settings for one in suite.contenders)
    assert suite.file.metrics[0] == "samples_per_second"


def test_weak_scaling_grows_the_batch_from_the_fewest_ranks(job: Path) -> None:
    suite, _ = scale_suite(job, {"measure": [2, 4], "weak": True})
    assert [one.settings["train.global_batch"] for one in suite.contenders] == ["8", "16"]
    suite, _ = scale_suite(job, {"measure": [2, 4], "weak": True, "batch_ranks": 4})
    assert [one.settings["train.global_batch"] for one in suite.contenders] == ["4", "8"]


def test_a_shipped_suite_gives_its_job(tmp_path: Path) -> None:
    suite, _ = scale_suite(find_suite("gpt"), {"measure": [1, 2]})
    assert suite.title == "Scaling of A small GPT on replicas"
    assert suite.name == "scale-gpt"
    assert "hidden = 256" in suite.job_text
    with pytest.raises(WanmaError, match="no single job"):
        scale_suite(find_suite("plan"), {})


def test_what_a_suite_varies_must_be_given(tmp_path: Path) -> None:
    path = tmp_path / "suite.toml"
    path.write_text('job = "small.toml"\n[over]\n"train.precision" = ["fp32", "bf16"]\n')
    (tmp_path / "small.toml").write_text(JOB)
    with pytest.raises(WanmaError) as failure:
        scale_suite(path, {})
    assert failure.value.hint == "give one value: train.precision=VALUE"
    suite, _ = scale_suite(path, {"measure": [1]}, overrides=["train.precision=bf16"])
    assert suite.contenders[0].settings["train.precision"] == "bf16"


def test_ranks_that_the_other_dimensions_do_not_divide_are_refused(job: Path) -> None:
    with pytest.raises(WanmaError, match="dp_replicate take 2 ranks"):
        scale_suite(job, {"measure": [2, 3]}, overrides=["parallel.tp=2"])


def test_accelerators_grow_the_shards_of_an_open_layout(job: Path) -> None:
    options = {"measure": [], "clusters": ["1x8 A100 SXM 80GB, 1x100G"]}
    suite, _ = scale_suite(job, options, overrides=["parallel.auto=true", "cluster.device=auto"])
    assert suite.file.scale is not None
    assert suite.file.scale.axis == "dp_shard"
    assert suite.contenders == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ["H100 SXN"]}, "is not in the device catalogue"),
        ({"clusters": ["8x8 H100 SXM, fast"]}, "does not describe a network"),
        ({"network": "fast"}, "does not describe a network"),
    ],
)
def test_wrong_hardware_is_refused_before_anything_is_measured(
    job: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(WanmaError, match=message):
        scale_suite(job, options)


def test_a_scaling_that_is_only_forecast_is_an_ordinary_result(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    arguments = [
        "bench",
        "scale",
        str(job),
        *["cluster.device=auto", "train.precision=bf16", "--measure", "none"],
    ]
    arguments += ["--gpu", "A100 SXM 80 GB", "--to", "16", "--weak", "--results", str(results)]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "A100 SXM 80 GB, dp_replicate" in output
    (directory,) = list_result_directories(results)
    result = directory.read()
    assert result.ended
    assert result.measurements == ()
    assert result.scale is not None
    assert [point.ranks for point in result.scale.curves[0].points] == [1, 2, 4, 8, 16]
    assert main(["bench", "list", "--results", str(results)]) == 0
    assert "Scaling of job small.toml" in capsys.readouterr().out
    assert main(["bench", "show", directory.id, "--results", str(results)]) == 0
    assert "efficiency" in capsys.readouterr().out
    suite = read_stored_suite(directory).suite
    assert suite.file.scale is not None
    assert suite.file.scale.gpus == ["A100 SXM 80 GB"]


@pytest.mark.full
def test_ranks_of_this_node_are_measured_and_forecast(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    arguments = ["bench", "scale", str(job), "--measure", "1,2", "--rounds", "1", "--to", "2"]
    arguments += ["--steps", "30", "--foreign-limit", "1e9", "--results", str(results)]
    assert main(arguments) == 0
    (directory,) = list_result_directories(results)
    result = directory.read()
    assert result.scale is not None
    (curve,) = result.scale.curves
    assert curve.name.endswith(", dp_replicate")
    points = {point.ranks: point for point in curve.points}
    threads = set()
    for ranks in (1, 2):
        contender = f"dp_replicate={ranks}"
        assert len(result.measurements_of(contender)) == 1
        plan = result.contender(contender).plan
        assert plan is not None
        assert plan["plan"]["dp_replicate"] == ranks
        threads.add(plan["plan"]["threads_per_rank"])
        # A series that does not settle on a busy machine has no throughput.
        rate = result.summaries[contender].get("samples_per_second")
        measured = points[ranks].measured if ranks in points else None
        assert (measured and measured.value) == (rate and rate.median)
        forecast = plan["forecast"]["step"]
        if forecast is not None and ranks in points:
            assert points[ranks].step_seconds == pytest.approx(forecast["seconds"])
    assert len(threads) == 1
    assert "Measurements" in capsys.readouterr().out
    assert curve.name in directory.page.read_text()
