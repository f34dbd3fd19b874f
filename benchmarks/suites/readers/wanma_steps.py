"""Steps of a job, loaded as `wanma train` loads them."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from contents import Batch, Content
from reading import begin, measure
from text_data import SEQUENCE, TextData

from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.step_loader import StepLoader
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


def prepare(section: DataSection) -> None:
    """Make what a job prepares once, before its ranks start."""
    prepare_job_data(section)


@contextmanager
def batches_of_steps(section: DataSection, options: argparse.Namespace) -> Iterator[Iterator[Batch]]:
    """Iterator over the batches of a job with these data, on one rank."""
    train = TrainSection(steps=1_000_000_000, global_batch=options.batch)
    with StepLoader(
        open_dataset(section, train),
        Plan(micro_batch=options.batch),
        train,
        0,
        options.start // options.batch,
        section.prefetch,
        section.worker_count,
        prefetch_bytes=section.prefetch_bytes,
    ) as loader:
        yield _batches(loader)


def measure_text(
    options: argparse.Namespace, data: TextData, files: Sequence[Path], content: Content, **keys: Any
) -> None:
    """Measure the reading of text files with an empty cache, so that the first start prepares them.

    Args:
        options: options of the reader.
        data: data of the suite.
        files: files to read.
        content: content by which the samples are checked.
        **keys: further keys of `[data]`.
    """
    cache = tempfile.mkdtemp(prefix="cache-", dir=options.folder)
    try:
        section = DataSection(
            text=[str(path) for path in files],
            tokenizer=str(data.tokenizer_file),
            sequence_length=SEQUENCE,
            validation_fraction=0.0,
            cache=cache,
            **keys,
        )
        began = begin(options, *files)
        prepare(section)
        with batches_of_steps(section, options) as batches:
            measure(batches, content, options, began)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _batches(loader: StepLoader) -> Iterator[Batch]:
    for step in loader:
        for batch in step.micro_batches:
            yield batch.inputs[0], batch.targets
