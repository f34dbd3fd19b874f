"""Forecasts of the data feed and of text preparations, compared with measured rates on this machine.

    python -m benchmarks.planner.data_feed --write        # three minutes; docs/results/data-feed.md

Images are JPEG files of 300 to 500 pixels, on the disk and in a store whose requests take 30 ms; text is
tokenized by byte-pair encoding from the same store. Each forecast is made before the measurement, from what a
plan measures itself: a probe of the store, some decoded samples, some encoded text. It counts as right from
half to twice the measured rate. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import io
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, commit, machine, table
from benchmarks.planner.slow_store import slow_store

PAGE = RESULTS / "data-feed.md"
IMAGES, BATCH, SIZE = 768, 32, 224
SHARD_IMAGES = 64
TEXT_FILES, TEXT_BYTES = 12, 6 << 20
DELAY_SECONDS = 0.03
SECONDS = 10.0
"""Seconds of loading in each measurement."""
BAND = (0.5, 2.0)
"""Forecast over measured rate that counts as right."""
HEADER = ("data", "loader threads", "forecast", "measured", "forecast / measured", "slowest part")


@dataclass(frozen=True)
class Comparison:
    """Forecast and measurement of one case."""

    name: str
    workers: str
    unit: str
    forecast: float
    measured: float
    cause: str

    @property
    def ratio(self) -> float:
        return self.forecast / self.measured

    @property
    def is_right(self) -> bool:
        return BAND[0] <= self.ratio <= BAND[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of each measurement")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wanma-data-feed-") as name:
        comparisons = list(compare(Path(name), options.seconds))
    text = report(comparisons)
    print(text)
    if options.write:
        PAGE.write_text(text)
    sys.exit(0 if all(one.is_right for one in comparisons) else 1)


def compare(folder: Path, seconds: float) -> Iterator[Comparison]:
    """Yield each comparison."""
    write_images(folder / "files", IMAGES)
    with slow_store(folder / "files", DELAY_SECONDS) as address:
        local = [str(path) for path in sorted((folder / "files").glob("*.tar"))]
        remote = [f"{address}/{Path(path).name}" for path in local]
        for place, entries in (("disk", local), ("store, 30 ms", remote)):
            for workers in (1, 2):
                cache = folder / f"cache-{place[:4]}-{workers}"
                yield compare_images(f"JPEG, {place}", entries, workers, cache, seconds)
        yield compare_text(folder, address)


def compare_images(name: str, entries: list[str], workers: int, cache: Path, seconds: float) -> Comparison:
    """Compare the feed of one rank that reads images with a cold node cache."""
    from wanma.data.opening import open_dataset
    from wanma.data.step_loader import StepLoader
    from wanma.hardware.discovery.node import discover_node
    from wanma.job.file.loading import to_job
    from wanma.job.plan.plan import Plan
    from wanma.planner.forecast.data_loading import load_cost
    from wanma.planner.forecast.problem import PlanningInputs
    from wanma.planner.hardware_model.calibration import load_calibration
    from wanma.planner.preparation.job_workload import read_model

    job = to_job(
        {
            "model": {"preset": "resnet-18"},
            "data": {
                "images": entries,
                "image_transform": {"size": SIZE, "augment": ["random_resized_crop", "horizontal_flip"]},
                "validation_fraction": 0,
                "cache": str(cache),
                "workers": workers,
            },
            "train": {"steps": IMAGES // BATCH, "global_batch": BATCH},
        }
    )
    workload = read_model(job).workload
    assert workload is not None
    plan = Plan(micro_batch=BATCH)
    problem = PlanningInputs(job, discover_node(), workload, None, load_calibration()).problem()
    cost = load_cost(problem, plan)
    cause = max(cost.parts, key=lambda part: cost.parts[part])
    forget_blocks(cache)
    data = open_dataset(job.data, job.train)
    count, start = 0, time.perf_counter()
    with StepLoader(
        data, plan, job.train, 0, 0, job.data.prefetch, workers, prefetch_bytes=job.data.prefetch_bytes
    ) as steps:
        for _ in steps:
            count += BATCH
            if time.perf_counter() - start > seconds:
                break
    measured = count / (time.perf_counter() - start)
    return Comparison(name, str(workers), "samples/s", BATCH / cost.peak_seconds, measured, cause)


def forget_blocks(cache: Path) -> None:
    """Remove the blocks that planning has downloaded, so that loading begins with none."""
    import shutil

    shutil.rmtree(cache / "blocks", ignore_errors=True)


def compare_text(folder: Path, address: str) -> Comparison:
    """Compare the time of preparing text from the store with its forecast."""
    from wanma.data.opening import prepare_job_data, text_preparation
    from wanma.hardware.discovery.node import discover_node
    from wanma.job.sections.data import DataSection
    from wanma.planner.forecast.text_preparation import forecast_preparation

    names = write_text(folder / "files")
    section = DataSection(
        text=[f"{address}/{name}" for name in names],
        tokenizer=str(write_tokenizer(folder)),
        cache=str(folder / "cache-text"),
    )
    text = text_preparation(section)
    forecast = forecast_preparation(text, discover_node().nodes[0], 1)
    assert text is not None
    assert forecast is not None, text
    start = time.perf_counter()
    prepare_job_data(section)
    seconds = time.perf_counter() - start
    rates = [text.missing_bytes / 2**20 / value for value in (forecast.seconds, seconds)]
    return Comparison(
        "text, store, 30 ms",
        f"{forecast.processes} processes",
        "MiB/s",
        rates[0],
        rates[1],
        forecast.limits[0].cause,
    )


def write_images(folder: Path, count: int) -> None:
    """Write shards of JPEG files with the detail of photographs: noise of several scales."""
    from PIL import Image

    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    for shard in range(0, count, SHARD_IMAGES):
        with tarfile.open(folder / f"shard-{shard:05d}.tar", "w") as archive:
            for number in range(shard, min(shard + SHARD_IMAGES, count)):
                width, height = (int(side) for side in draws.integers(300, 501, 2))
                pixels = np.zeros((height, width, 3))
                for scale in (64, 16, 4):
                    small = draws.normal(0, 30, (height // scale + 2, width // scale + 2, 3))
                    pixels += np.kron(small, np.ones((scale, scale, 1)))[:height, :width]
                stream = io.BytesIO()
                image = Image.fromarray(np.clip(pixels + 128, 0, 255).astype(np.uint8))
                image.save(stream, "jpeg", quality=90)
                for suffix, content in (("jpg", stream.getvalue()), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_text(folder: Path) -> list[str]:
    """Write files of Python's own source, each with other parts of it; return their names."""
    source = library_source()
    names = []
    for number in range(TEXT_FILES):
        start = number * 977_777 % len(source)
        content = (source[start:] + source)[:TEXT_BYTES]
        (folder / f"text-{number:02d}.txt").write_bytes(content)
        names.append(f"text-{number:02d}.txt")
    return names


def library_source() -> bytes:
    """Return some megabytes of the standard library's source."""
    import sysconfig

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    content = b"".join(path.read_bytes() for path in files)
    return content * (TEXT_BYTES // len(content) + 1)


def write_tokenizer(folder: Path) -> Path:
    """Train a byte-pair tokenizer of 8,192 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = library_source()[: 2 << 20].decode(errors="replace")
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def report(comparisons: list[Comparison]) -> str:
    """Return the page of results."""
    rows = [
        (
            one.name,
            one.workers,
            f"{one.forecast:,.3g} {one.unit}",
            f"{one.measured:,.3g} {one.unit}",
            f"{one.ratio:.2f}",
            one.cause,
        )
        for one in comparisons
    ]
    right = sum(one.is_right for one in comparisons)
    return "\n".join(
        [
            "# Data feed: forecast and measured",
            "",
            f"{right} of {len(comparisons)} forecasts are from {BAND[0]:g} to {BAND[1]:g} times the measured "
            "rate. Forecasts use what a plan measures: a probe of the store, decoded samples, encoded text.",
            "",
            table(HEADER, rows),
            f"JPEG files of 300 to 500 pixels, a random region resized to {SIZE} pixels, batches of {BATCH}; "
            f"cold node cache. Text: {TEXT_FILES} files of {TEXT_BYTES >> 20} MiB, byte-pair encoding.",
            "",
            f"{machine()}; {commit()}; {datetime.date.today().isoformat()}. "
            "`python -m benchmarks.planner.data_feed --write`",
            "",
        ]
    )


if __name__ == "__main__":
    main()
