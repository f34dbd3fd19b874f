"""`wanma data prepare`: token files and indexes before a run, by one process or several."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from support.data_command import DataCommand
from support.data_files import add_member
from support.labelled_images import picture
from wanma.data.text.token_file import open_token_file
from wanma.observe.console import dataset_progress
from wanma.observe.units import bytes_text

JOB = """\
[model]
preset = "gpt-1m"
[data]
sources = [{name = "x", text = ["x"], weight = 3}, {name = "y", text = ["y"]}]
sequence_length = 8
cache = "cache"
[train]
steps = 100
global_batch = 10
batch_ramp = [[0, 2], [5, 10]]
"""


@pytest.fixture
def job(data: DataCommand) -> DataCommand:
    for source in "xy":
        (data.folder / source).mkdir()
        for number in range(20):
            (data.folder / source / f"{number}.txt").write_text(
                f"{source} {number} ten thousand horses\n" * 5
            )
    (data.folder / "job.toml").write_text(JOB)
    return data


def test_prepare_builds_what_a_run_needs(job: DataCommand) -> None:
    ran = job("prepare", "job.toml")
    ran.check()
    assert ran.out.startswith("ready in ")
    assert ran.out.rstrip().endswith("cache: cache")
    folders = [path for path in (job.folder / "cache" / "tokens").iterdir() if path.is_dir()]
    assert sorted(open_token_file(folder).header["documents"] for folder in folders) == [20, 20]
    assert job("prepare", "job.toml", "data.cache=cache").code == 0


def test_prepare_names_what_is_missing(job: DataCommand) -> None:
    ran = job("prepare", "job.toml", "data.tokenizer=missing.json")
    assert ran.code == 2
    assert "data.tokenizer: 'missing.json'" in ran.told_once()


def test_prepare_has_nothing_to_do_for_a_program(job: DataCommand) -> None:
    (job.folder / "own.toml").write_text('[model]\npreset = "gpt-1m"\n[data]\nfactory = "faulty:data"\n')
    ran = job("prepare", "own.toml")
    assert ran.code == 0
    assert "nothing to prepare" in ran.out


TABLE_JOB = """\
[model]
factory = "torch.nn:Linear"
arguments = { in_features = 1, out_features = 2 }
[data]
path = "rows.csv"
columns = { features = ["x"], target = "species" }
"""
RATINGS_JOB = """\
[model]
family = "recommender"
kind = "matrix_factorization"
[data]
path = "rows.csv"
interactions = { split = "random" }
"""


@pytest.mark.parametrize(
    ("job_text", "rows"),
    [
        (TABLE_JOB, "x,species\n" + "1.5,ant\n0.5,owl\n" * 50),
        (RATINGS_JOB, "user,item,rating,time\n" + "3,7,4.5,10\n0,2,1,9\n" * 50),
    ],
    ids=["table", "interactions"],
)
def test_prepare_shows_progress_of_an_index_and_of_the_reading_after_it(
    job_text: str, rows: str, data: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_progress, "LINE_INTERVAL_SECONDS", 0.0)  # a line for each call
    (data.folder / "rows.csv").write_text(rows)
    (data.folder / "job.toml").write_text(job_text)
    ran = data("prepare", "job.toml")
    ran.check()
    size = bytes_text(len(rows))
    assert ran.err.count(f"preparing: {size} of {size}\n") == 2


SCAN = """
import sys, threading, time
from pathlib import Path
from wanma.cli.main import main
from wanma.data.formats.tar_samples import TarSamples
folder, name = map(Path, sys.argv[1:])
scan, count, lock = TarSamples.scan, 0, threading.Lock()
def counted(*given):
    global count
    with lock:
        count += 1
    (folder / f"begun-{name}").touch()
    while len(list(folder.glob("begun-*"))) < 2:  # neither does its first file before the other has begun one
        time.sleep(0.01)
    return scan(*given)
TarSamples.scan = counted
code = main(["data", "prepare", f"{folder}/job.toml"])
print(code, count)
"""


def test_two_processes_scan_the_files_of_an_index_together(job: DataCommand) -> None:
    folder = job.folder
    (folder / "images").mkdir()
    for shard in range(12):
        with tarfile.open(folder / "images" / f"{shard:02}.tar", "w") as archive:
            for number in range(3):
                add_member(archive, f"{number}.png", picture(shard))
                add_member(archive, f"{number}.cls", str(shard).encode())
    (folder / "job.toml").write_text(
        f'[model]\npreset = "gpt-1m"\n[data]\nimages = ["{folder}/images"]\ncache = "{folder}/cache"\n'
    )
    assert job("prepare", "job.toml", f"data.cache={folder}/alone").code == 0
    command = [sys.executable, "-c", SCAN, str(folder)]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    results = [process.communicate(timeout=120)[0].splitlines()[-1].split() for process in both]
    assert [code for code, _ in results] == ["0", "0"]
    assert sum(int(count) for _, count in results) == 12, "no file is scanned twice"
    assert index_files(folder / "cache") == index_files(folder / "alone")


def index_files(cache: Path) -> dict[str, bytes]:
    files = [path for path in (cache / "index").rglob("*") if path.is_file()]
    return {str(path.relative_to(cache)): path.read_bytes() for path in files}
