"""Published scalings beside forecasts, and what their figures say of one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.scale_blocks import published_block
from wanma.bench.programs.places import filled
from wanma.bench.results.result import BenchmarkResult
from wanma.bench.results.stored_study import Interval, PublishedScaling
from wanma.bench.scale.bands import band_rule
from wanma.bench.scale.forecasts import ScaledJob
from wanma.bench.scale.growth import growth_of
from wanma.bench.scale.published import published_sentences, study_published
from wanma.bench.scale.study import forecast_speedup
from wanma.bench.scale.targets import target_of_cluster
from wanma.bench.suites.prepared_data import prepare_cifar10
from wanma.bench.suites.scale_table import PublishedTable
from wanma.bench.suites.suite_file import find_suite, make_suite, read_suite_file
from wanma.job.file.loading import load_job
from wanma.models.workload.model_workload import build_section_workload
from wanma.planner.hardware_model.calibration import Calibration

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "measure-scaling.md"
DECODER = """\
[model]
preset = "gpt-125m"

[data]
text = ["stdlib"]
sequence_length = 1024

[train]
global_batch = 256
precision = "fp16"

[parallel]
recompute = "auto"
"""


def table(**changes: object) -> PublishedTable:
    content = {
        "title": "servers",
        "source": "Nobody.",
        "cluster": "1x8 V100 SXM2 16 GB, 1x100G",
        "counts": [1, 4],
        "speedup": 3.5,
        "efficiency": 0.875,
        "variants": [{"train.global_batch": "256"}],
    }
    return PublishedTable.model_validate({**content, **changes})


@pytest.fixture(scope="module")
def cifar10(tmp_path_factory: pytest.TempPathFactory) -> PublishedScaling:
    folder = tmp_path_factory.mktemp("cifar10")
    path = find_suite("cifar10")
    file = read_suite_file(path)
    job = folder / "job.toml"
    text = make_suite("cifar10", file, path.parent).job_text
    job.write_text(filled(text, {"data": str(prepare_cifar10(folder))}))
    (published,) = file.published
    return study_published(published, job)


def test_the_published_case_of_four_servers_stands_beside_its_forecasts(cifar10: PublishedScaling) -> None:
    assert (cifar10.speedup, cifar10.ideal, cifar10.efficiency) == (3.5, 4.0, 0.875)
    speedups = [one.speedup for one in cifar10.forecasts]
    assert len(speedups) == 4
    values = [speedup.value for speedup in speedups if speedup is not None]
    assert values == sorted(values), "a larger batch scales better"
    assert values[0] < 1 < values[-1] < 4
    assert any(one is not None and one.low <= 3.5 <= one.high for one in speedups)


def test_its_other_figures_contradict_each_other(cifar10: PublishedScaling) -> None:
    """2,000 images a minute for 30 minutes are 60,000 images: 1.2 epochs of 50,000."""
    first, _, second = cifar10.sentences
    assert first == "Speedup 3.5 on 4 times the servers is an efficiency of 3.5 / 4 = 0.875."
    assert "2,000 × 30 = 60,000 samples, and 60,000 / 50,000 = 1.2 epochs of 50,000" in second
    assert "contradict each other" in second


def test_its_speedup_over_a_card_is_no_efficiency_over_servers(cifar10: PublishedScaling) -> None:
    """3.5 over one of 16 cards: 0.22, and 0.875 only over the 4 servers."""
    assert "Over the 16 devices the efficiency is 3.5 / 16 = 0.22." in cifar10.sentences[1]
    published, over_device, *forecasts = published_block(cifar10).rows
    assert published == ("published", "3.5", "4", "87.5 %", "2,000")
    assert over_device[1:4] == ("3.5", "16", "21.9 %")
    last = cifar10.forecasts[-1].samples_per_second
    assert last is not None
    assert forecasts[-1][-1] == f"{60 * last:,.0f}"


def test_figures_that_agree_are_said_to_agree_and_others_not() -> None:
    (agreeing,) = published_sentences(table())
    assert agreeing.endswith("= 0.875.")
    (other,) = published_sentences(table(efficiency=0.95))
    assert other.endswith("= 0.875, and not the published 0.95.")
    long = table(minutes=600, samples_per_minute=5000, epoch_samples=50_000)
    assert published_sentences(long)[1] == (
        "5,000 samples a minute for 600 minutes are 5,000 × 600 = 3,000,000 samples, "
        "and 3,000,000 / 50,000 = 60 epochs of 50,000."
    )


def test_a_variant_without_a_plan_says_why(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(DECODER)
    variants = [{"train.global_batch": "256"}, {"train.global_batch": "16"}]
    scaling = study_published(table(variants=variants), job)
    good, bad = scaling.forecasts
    assert good.speedup is not None
    assert good.samples_per_second is not None
    assert "less than one sample each" in bad.reason
    rows = published_block(scaling).rows
    assert rows[0] == ("published", "3.5", "4", "87.5 %", "–")
    assert rows[2][1] == "–"
    result = BenchmarkResult("id", "name", "title", "2026-11-26T00:00:00+00:00", (), published=(scaling,))
    assert BenchmarkResult.from_json(result.to_json()).published == (scaling,)
    page = result_page(result)
    assert "Published: servers, 4 servers over 1" in page
    assert "forecast, train.global_batch = 256" in page
    assert "No forecast, train.global_batch = 16" in page


def test_a_variant_whose_plan_cannot_run_keeps_its_forecast_and_says_why(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(DECODER)
    split = {"train.optimizer": "adafactor", "parallel.tp": "2"}
    scaling = study_published(table(variants=[{"train.global_batch": "256"}, split]), job)
    good, bad = scaling.forecasts
    assert good.unsupported == ""
    assert bad.speedup is not None
    assert "train.optimizer = 'adafactor'" in bad.unsupported
    (warning,) = published_block(scaling).warnings
    assert warning.startswith("train.optimizer = adafactor, parallel.tp = 2: this plan cannot run: ")
    assert bad.unsupported in warning


def test_counts_must_rise() -> None:
    with pytest.raises(ValueError, match="counts must rise"):
        table(counts=[4, 1])


def test_the_guide_has_the_forecasts_of_this_planner(cifar10: PublishedScaling) -> None:
    (row,) = [line for line in GUIDE.read_text().splitlines() if line.startswith("| forecast speedup |")]
    shown = [float(cell) for cell in row.strip("| ").split("|")[1:]]
    assert shown == [round(one.speedup.value, 2) for one in cifar10.forecasts if one.speedup is not None]


@pytest.fixture(scope="module")
def four_servers(tmp_path_factory: pytest.TempPathFactory) -> Interval:
    """Forecast speedup of ResNet-50 from 1 to 4 servers of 8 V100 with InfiniBand of 100 Gbit/s.

    With 128 images per GPU, in fp32. No record of the bands has images.
    """
    path = tmp_path_factory.mktemp("servers") / "job.toml"
    path.write_text(
        '[model]\npreset = "resnet-50"\nbatch_norm_group = 32\n[data]\nimages = "none"\n'
        "[train]\nglobal_batch = 1024\n"
    )
    job = load_job(path)
    workload = build_section_workload(
        job.model, vocabulary_size=None, sequence_length=None, image_shape=(3, 224, 224), classes=1000
    )
    assert workload is not None
    scaled = ScaledJob(path, workload, None, Calibration())
    target = target_of_cluster("1x8 V100 SXM2 16 GB, 1x100G")
    growth = growth_of(job, "dp_replicate", is_weak=True, batch_ranks=8, settings={})
    one, four = (scaled.forecast_layout(target, growth, ranks) for ranks in (8, 32))
    assert one.forecast is not None, one.reason
    assert four.forecast is not None, four.reason
    rule = band_rule(scaled.hardware_class(target))
    return forecast_speedup(rule, four.forecast / one.forecast, 32, 8)


@pytest.mark.parametrize(
    ("source", "speedup"),
    [
        ("OneFlow", 11711.18 / 2969.45),
        ("PyTorch", 10632.33 / 2719.07),
        ("PyTorch with DALI", 10032.72 / 2707.42),
        ("TensorFlow 2", 9418.44 / 2458.74),
        ("PaddlePaddle", 9348.17 / 2625.38),
        ("MXNet", 10419.21 / 2947.72),
        ("TensorFlow 1", 9514.64 / 2721.98),
    ],
)
def test_four_servers_of_dlperf_are_within_the_band(
    source: str, speedup: float, four_servers: Interval
) -> None:
    """Oneflow-Inc/DLPerf, reports/dlperf_benchmark_test_report_v1.md."""
    assert four_servers.low <= speedup <= four_servers.high, source
    shown = f"speedup forecast {four_servers.value:.2f} ({four_servers.low:.2f}–{four_servers.high:.2f})"
    assert f"{shown} over servers" in " ".join(GUIDE.read_text().split())
