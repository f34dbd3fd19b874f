"""The front door: text as `BatchedDataset`, what `prepare_job_data` leaves behind, and law 2 end to end."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from wanma.data import opening as front_door
from wanma.data.index.records import cache_folder
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.data.text import corpus as corpus_module
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.data import DataSection, SourceSection
from wanma.job.sections.train import TrainSection


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for number in range(120):
        words = " ".join(str(value) for value in random.integers(0, 1000, random.integers(5, 60)))
        (folder / f"{number:03}.txt").write_text(f"{number}: {words}\n")
    return folder


def section(corpus: Path, **values: object) -> DataSection:
    given = {"text": [str(corpus)], "sequence_length": 16, "validation_fraction": 0.1, **values}
    return DataSection(cache=str(corpus.parent / "cache"), **given)  # type: ignore[arg-type]


def mixed(corpus: Path) -> DataSection:
    sources = [
        SourceSection(name="low", text=[f"{corpus}/0*.txt"], weight=0.7),
        SourceSection(name="high", text=[f"{corpus}/1*.txt"], weight=0.3),
    ]
    return section(corpus, text=[], sources=sources)


def test_targets_are_the_inputs_shifted_by_one(corpus: Path) -> None:
    data = open_dataset(section(corpus), TrainSection())
    batch = data.batch(range(5))
    assert batch.inputs[0].shape == batch.targets.shape == (5, 16)
    assert batch.inputs[0].dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.inputs[0][:, 1:], batch.targets[:, :-1])
    assert batch.keywords == {}
    assert (data.input_kind, data.vocabulary_size, data.targets_per_sample) == ("tokens", 257, 16)


def test_an_epoch_is_every_sequence_of_the_training_documents_once(corpus: Path) -> None:
    data = open_dataset(section(corpus), TrainSection())
    rows = data.batch(range(data.train_samples)).inputs[0]
    text = "".join(chr(token) if token < 256 else "\0" for token in rows.flatten().tolist())
    described = data.describe()["sources"][0]
    assert len(text) == data.train_samples * 16 <= described["train_tokens"]
    whole = open_dataset(section(corpus, validation_fraction=0), TrainSection())
    assert whole.validation_samples == 0
    assert whole.train_samples > data.train_samples > 0.8 * whole.train_samples


def test_validation_is_a_fixed_shuffle_apart_from_training(corpus: Path) -> None:
    for job in (section(corpus), mixed(corpus)):
        data = open_dataset(job, TrainSection())
        count = data.validation_samples
        validation = {tuple(row) for row in data.validation_batch(range(count)).inputs[0].tolist()}
        train = {tuple(row) for row in data.batch(range(data.train_samples)).inputs[0].tolist()}
        assert len(validation) == count > 3
        assert not validation & train
        again = open_dataset(job, TrainSection()).validation_batch(range(3))
        assert torch.equal(again.inputs[0], data.validation_batch(range(3)).inputs[0])
        assert not data.validation_batch([]).real.any()


def test_document_masks_keep_documents_apart(corpus: Path) -> None:
    data = open_dataset(section(corpus, document_masks=True, sequence_length=128), TrainSection())
    batch = data.batch(range(20))
    tokens, targets = batch.inputs[0], batch.targets
    documents, positions = batch.keywords["documents"], batch.keywords["positions"]
    assert documents.shape == positions.shape == tokens.shape
    ends = tokens == 256
    assert ends.any()
    assert torch.equal(targets == -100, ends)
    assert torch.equal(documents[:, 1:] - documents[:, :-1], ends[:, :-1].long())
    assert (positions[:, 1:][ends[:, :-1]] == 0).all()
    plain = open_dataset(section(corpus, sequence_length=128), TrainSection()).batch(range(20))
    assert torch.equal(plain.inputs[0], tokens)
    assert torch.equal(plain.targets[~ends], targets[~ends])


def test_a_job_without_data_trains_on_the_standard_library(tmp_path: Path) -> None:
    data = open_dataset(DataSection(cache=str(tmp_path)), TrainSection())
    assert data.train_samples > 20_000
    assert data.describe()["documents"] > 300


def test_a_single_document_is_split_inside_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one.txt").write_text("0123456789" * 100)
    job = section(tmp_path, text=[str(tmp_path / "one.txt")])
    with caplog.at_level(logging.WARNING):
        prepare_job_data(job)
    assert "10.0% of each document" in caplog.text
    data = open_dataset(job, TrainSection())
    assert data.describe()["sources"][0]["validation_tokens"] == 101


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text": ["/no/such"]}, r"data\.text\[0\]: '/no/such' does not exist"),
        ({"tokenizer": "/no/such.json"}, r"data\.tokenizer: '/no/such\.json': no such file"),
        ({"sequence_length": 10**6}, r"data\.sequence_length: 1000000 is"),
        ({"text": [], "images": "/no/such"}, r"data\.images: '/no/such' does not exist"),
    ],
)
def test_bad_input_is_refused_before_ranks_start(
    corpus: Path, values: dict[str, object], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        prepare_job_data(section(corpus, **values))


def test_progress_counts_all_sources_together(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    job = mixed(corpus).model_copy(update={"cache": str(tmp_path)})
    prepare_job_data(job, lambda done, total: seen.append((done, total)))
    total = sum(path.stat().st_size for path in corpus.iterdir())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_the_cache_is_the_jobs_or_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder(DataSection(cache="/x").cache) == Path("/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder(DataSection().cache) == Path("/caches/wanma")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(DataSection().cache) == Path.home() / ".cache" / "wanma"


QUIET = """
import os, sys
import wanma.data.opening
import wanma.data.text.tokenization_process, wanma.data.text.tokenizer, wanma.data.text.encoding_task
from wanma.job.sections.data import DataSection
assert len(os.listdir("/proc/self/task")) == 1, "a thread after import"
section = DataSection(text=[sys.argv[1]], sequence_length=16, cache=sys.argv[2], tokenizer=sys.argv[3])
wanma.data.text.encoding_task.TASK_BYTES = 2000
wanma.data.text.tokenization._BPE_TEXT_PER_PROCESS = 100
wanma.data.opening.prepare_job_data(section)
assert len(os.listdir("/proc/self/task")) == 1, "a thread after prepare_job_data"
assert "torch" not in sys.modules
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("alone")
"""


@pytest.mark.parametrize("kind", ["text", "text in processes", "records"])
def test_preparing_imports_no_torch_and_leaves_no_thread_and_no_process(
    corpus: Path, tmp_path: Path, kind: str
) -> None:
    tokenizer, data, program = "bytes", corpus, QUIET
    if kind == "text in processes":
        backend = Backend(models.WordLevel({"1": 0, "?": 1}, unk_token="?"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.save(tokenizer := str(tmp_path / "t.json"))
    elif kind == "records":  # whose library starts threads
        data, program = tmp_path / "a.parquet", QUIET + 'assert "pyarrow" not in sys.modules\n'
        pq.write_table(pa.table({"text": [f"row {number} of some" for number in range(50)]}), data)
    # numpy's own linear algebra starts its threads on import unless told not to
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(data), str(tmp_path / "cache"), tokenizer]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.returncode) == ("alone\n", 0), result.stderr


def test_storage_with_threads_is_prepared_in_another_process(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_door, "reads_remote_storage", lambda _: True)
    here: list[Any] = []
    build = corpus_module.open_or_build_token_file
    monkeypatch.setattr(
        corpus_module, "open_or_build_token_file", lambda *a, **k: (here.append(a), build(*a, **k))[1]
    )
    seen: list[tuple[int, int]] = []
    job = section(corpus).model_copy(update={"cache": str(tmp_path)})
    prepare_job_data(job, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in corpus.iterdir())
    assert len(list((tmp_path / "tokens").glob("*/header.json"))) == 1
    assert not here, "not in this process"
    with pytest.raises(WanmaError, match=r"text\[0\]: '/no/such' does not exist") as told:
        prepare_job_data(section(corpus, text=["/no/such"]))
    assert told.value.exit_code == 2
