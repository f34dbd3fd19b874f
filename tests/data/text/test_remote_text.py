"""Text in remote stores: read by the client of the stores, through a cache, past answers that are errors."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from support.data_files import compress
from support.faulty_proxy import SLOW_DOWN, Fault, Request
from support.s3_server import S3Server
from support.text_formats import build_token_file, json_lines
from support.webhdfs import Operation, webhdfs
from wanma.data.documents.text_files import list_documents, read_chunks
from wanma.data.opening import open_dataset, prepare_job_data
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection

DOCUMENTS = [random.Random(seed).randbytes(seed * 40).hex() for seed in range(1, 60)]


def fill(s3: S3Server, folder: Path) -> None:
    """Write the same corpus to the store and to a local folder."""
    folder.mkdir()
    pq.write_table(pa.table({"text": DOCUMENTS[40:]}), folder / "b.parquet")
    (folder / "part-0.jsonl.zst").write_bytes(compress(json_lines(DOCUMENTS[:20]), "zstd"))
    (folder / "part-1.jsonl.zst").write_bytes(compress(json_lines(DOCUMENTS[20:40]), "zstd"))
    (folder / "notes.txt").write_text("notes")
    for path in folder.iterdir():
        s3.put(f"corpus/{path.name}", path.read_bytes())


def entries(root: str) -> list[str]:
    return [f"{root}/part-*.jsonl.zst", f"{root}/*.parquet", f"{root}/notes.txt"]


def test_objects_give_the_tokens_of_local_files_past_a_store_that_asks_for_pauses(
    s3: S3Server, tmp_path: Path
) -> None:
    fill(s3, tmp_path / "corpus")
    local = build_token_file(entries(str(tmp_path / "corpus")), tmp_path / "local")
    faults = [SLOW_DOWN, Fault(cut_at=2), Fault(500), SLOW_DOWN]

    def choose(request: Request) -> Fault | None:
        return faults.pop() if faults and request.is_ranged else None

    s3.proxy.fault = choose
    remote = build_token_file(entries("s3://bucket/corpus"), tmp_path / "remote")
    assert not faults, "all faults have happened"
    assert remote.fingerprint == local.fingerprint
    assert not (remote.folder / "blocks").exists()
    successes = len(s3.proxy.ranged_requests) - 4
    assert successes == 4, "each file leaves the store once"


def test_a_job_reads_text_from_a_store_in_a_process_of_its_own(s3: S3Server, tmp_path: Path) -> None:
    fill(s3, tmp_path / "corpus")
    sections = [
        DataSection(text=entries(root), sequence_length=32, cache=str(tmp_path / "cache"))
        for root in ("s3://bucket/corpus", str(tmp_path / "corpus"))
    ]
    seen: list[tuple[int, int]] = []
    traffic = prepare_job_data(sections[0], lambda *done: seen.append(done))
    assert traffic["store_requests", "s3"] == len(s3.proxy.ranged_requests) > 0
    assert seen[-1][0] == seen[-1][1] > 0
    prepare_job_data(sections[1])
    remote, local = (open_dataset(section, TrainSection()) for section in sections)
    assert remote.fingerprint == local.fingerprint


def test_an_error_of_a_datanode_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.txt").write_text("the text")
    with webhdfs(tmp_path / "root") as hdfs:
        (document,) = list_documents([hdfs.url("a.txt")])
        faults = [(500, "IOException"), (403, "StandbyException")]

        def choose(operation: Operation) -> tuple[int, str] | None:
            return faults.pop() if faults and operation.name == "OPEN" and operation.is_datanode else None

        hdfs.fault = choose
        assert b"".join(read_chunks(document)) == b"the text"
        assert not faults
