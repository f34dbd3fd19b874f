"""A checkpoint written anew: the same tensors in other files or dtypes, and the source as it was."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wanma.checkpoint.conversion.conversion import convert_checkpoint
from wanma.checkpoint.inspection.comparison import compare_checkpoints
from wanma.checkpoint.inspection.integrity_scan import LocalFiles, scan_checkpoint
from wanma.checkpoint.load.reader import load_full_tensors
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.errors import WanmaError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Checkpoint of three ranks, with optimizer state."""
    torch.manual_seed(0)
    tensors = {
        "model.a": torch.randn(40, 10),
        "model.b": torch.randn(7),
        "optimizer.a": torch.randn(40, 10).double(),
        "step": torch.tensor(4),
        "empty": torch.empty(0, 3),
    }
    ranks = [Checkpointer(tmp_path / "run", rank, 3) for rank in range(3)]
    for rank, checkpointer in enumerate(ranks):
        checkpointer.save(4, tensors, {"samples": 9}, rank_state={"random": rank}, metric=1.5)
    for checkpointer in ranks:
        checkpointer.close()
    return tmp_path / "run" / "step-00000004"


def kinds(path: Path) -> dict[str, str]:
    return {name: entry.dtype for name, entry in read_manifest(path).tensors.items()}


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("files", [1, 2, 9])
def test_into_other_files_all_tensors_and_the_state_stay(path: Path, tmp_path: Path, files: int) -> None:
    before = content(path)
    convert_checkpoint(path, tmp_path / "out", kinds(path), files, block_elements=7)
    assert content(path) == before
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == min(files, 5)
    assert scan_checkpoint("out", LocalFiles(tmp_path / "out")).defects == ()
    assert compare_checkpoints(path, tmp_path / "out").is_empty
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.step, manifest.world_size, manifest.metric) == (4, 3, 1.5)
    assert manifest.rank_state[2] == {"random": 2}


def test_one_file_is_what_the_safetensors_library_reads(path: Path, tmp_path: Path) -> None:
    convert_checkpoint(path, tmp_path / "out", kinds(path))
    loaded = load_file(tmp_path / "out" / "rank-00000.safetensors")
    full = load_full_tensors(path)
    assert loaded.keys() == full.keys()
    assert all(torch.equal(loaded[name], full[name]) for name in full)


def test_some_tensors_in_another_dtype(path: Path, tmp_path: Path) -> None:
    convert_checkpoint(path, tmp_path / "out", {"model.a": "BF16", "model.b": "F32"}, block_elements=16)
    full, source = load_full_tensors(tmp_path / "out"), load_full_tensors(path)
    assert sorted(full) == ["model.a", "model.b"]
    assert torch.equal(full["model.a"], source["model.a"].bfloat16())
    assert torch.equal(full["model.b"], source["model.b"])


def test_a_value_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"w": torch.tensor([1.0, 1e6])}, {})
    with pytest.raises(WanmaError, match=r"tensor w .* range of F16"):
        convert_checkpoint(tmp_path / "run" / "step-00000001", tmp_path / "out", {"w": "F16"})
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run"]


def test_a_damaged_checkpoint_is_not_given_new_hashes(path: Path, tmp_path: Path) -> None:
    file = path / "rank-00001.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(WanmaError, match=r"rank-00001\.safetensors is damaged"):
        convert_checkpoint(path, tmp_path / "out", kinds(path))
    assert not (tmp_path / "out").exists()


def test_a_place_that_is_taken_is_refused_the_source_included(path: Path) -> None:
    before = content(path)
    with pytest.raises(WanmaError, match="already exists"):
        convert_checkpoint(path, path, kinds(path))
    assert content(path) == before


def test_a_disk_that_fills_up_leaves_the_source_and_nothing_else(path: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in the kernel."""
    before = content(path)
    program = (
        "import sys, resource, signal, pathlib\n"
        "from wanma.checkpoint.conversion.conversion import convert_checkpoint\n"
        "from wanma.job.errors import WanmaError\n"
        "source, out = map(pathlib.Path, sys.argv[1:])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try:\n"
        "    convert_checkpoint(source, out, {'model.a': 'F32', 'optimizer.a': 'F64'})\n"
        "except WanmaError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "File too large" in done.stdout
    assert "free space" in done.stdout
    assert content(path) == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run"]
