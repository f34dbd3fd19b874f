"""One stream of plain text, records, stored tokens and conversations: law 2 against plain Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chats import conversations, tokens_of, write_chats, write_tokenizer
from support.killed_runs import (
    BLOCK,
    SHUFFLES,
    TOTAL,
    TRAIN,
    WINDOW,
    WORLD_SIZES,
    order_keys,
    read_with_kills,
)
from support.reference_order import reference_order
from support.text_formats import json_lines, write_megatron
from wanma.data.batch import IGNORE_INDEX
from wanma.data.data_kinds import with_data_kinds
from wanma.data.opening import open_dataset
from wanma.data.text.tokenizer import load_tokenizer
from wanma.job.file.loading import to_job
from wanma.job.sections.data import DataSection

LENGTH = 120
CHATS = conversations(20)
WEIGHTS = {"plain": 3, "jsonl": 2, "parquet": 2, "megatron": 1, "numpy": 1, "chat": 3}


def documents(seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh é", k=draw.randint(1, 90))) for _ in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def targets(folder: Path) -> dict[str, list[tuple[int, ...]]]:
    """Targets of the rows of each source, after its files are written."""
    tokenizer = load_tokenizer(str(write_tokenizer(folder / "tokenizer")))
    end = tokenizer.end_of_document_id
    texts = {name: documents(number) for number, name in enumerate(WEIGHTS) if name != "chat"}
    tokens = {name: [list(map(int, tokenizer.encode(one))) for one in found] for name, found in texts.items()}
    (folder / "plain").mkdir()
    for number, text in enumerate(texts["plain"]):
        (folder / "plain" / f"{number:03}.txt").write_text(text)
    (folder / "jsonl").write_bytes(json_lines(texts["jsonl"]))
    pq.write_table(pa.table({"input_ids": tokens["parquet"]}), folder / "parquet", row_group_size=7)
    (folder / "megatron").mkdir()
    write_megatron(folder / "megatron" / "a.bin", [[*one, end] for one in tokens["megatron"]])
    np.save(folder / "numpy.npy", np.array([token for one in tokens["numpy"] for token in one], "<u2"))
    tokens["numpy"] = [[token for one in tokens["numpy"] for token in one]]
    write_chats(folder / "chat", CHATS)
    rows = {}
    for name, found in tokens.items():
        joined = [token for one in found for token in (*one, end)]
        starts = range(1, len(joined) - LENGTH + 1, LENGTH)
        rows[name] = [tuple(joined[start : start + LENGTH]) for start in starts]
    rows["chat"] = [
        tuple(
            token if is_target else IGNORE_INDEX
            for token, is_target in [*one, *[(0, False)] * LENGTH][1:][:LENGTH]
        )
        for one in (tokens_of(tokenizer, chat) for chat in CHATS)
    ]
    return rows


def section(folder: Path, **keys: Any) -> DataSection:
    """The mixture, whose kinds follow from the content of the paths."""
    paths = {name: folder / name for name in WEIGHTS} | {"numpy": folder / "numpy.npy"}
    sources = [{"name": name, "path": str(paths[name]), "weight": WEIGHTS[name]} for name in WEIGHTS]
    data = {
        "sources": sources,
        "tokenizer": str(folder / "tokenizer"),
        "sequence_length": LENGTH,
        "validation_fraction": 0,
        "chat": {"packing": False, "too_long": "cut"},
        "cache": str(folder / "cache"),
        **keys,
    }
    return with_data_kinds(to_job({"model": {"preset": "gpt-1m"}, "data": data})).data


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_every_form_of_text_is_read_in_the_order_of_the_reference(
    folder: Path, targets: dict[str, list[tuple[int, ...]]], shuffle: str
) -> None:
    data = section(folder, **order_keys(shuffle))
    assert [one.content for one in data.sources] == ["text"] * len(WEIGHTS)
    draw = random.Random(shuffle)
    worlds = draw.sample(WORLD_SIZES, k=3)
    found = read_with_kills(lambda: open_dataset(data, TRAIN), TRAIN, worlds, draw.choice([1, 2]))
    rows = [targets[name] for name in WEIGHTS]
    stages = [(0, list(WEIGHTS.values()))]
    order = reference_order([len(one) for one in rows], stages, (shuffle, BLOCK, WINDOW), TRAIN.seed, TOTAL)
    assert found == [(sample, rows[source][row]) for sample, (source, row) in enumerate(order)]


def test_each_source_has_its_documents_its_epochs_and_its_share(
    folder: Path, targets: dict[str, list[tuple[int, ...]]]
) -> None:
    described = open_dataset(section(folder), TRAIN).describe()["sources"]
    assert [one["documents"] for one in described] == [40, 40, 40, 40, 1, len(CHATS)]
    assert [one["share"] * sum(WEIGHTS.values()) for one in described] == list(WEIGHTS.values())
    epochs = [one["epochs"] * len(targets[one["name"]]) for one in described]
    assert sum(epochs) == pytest.approx(TOTAL)
