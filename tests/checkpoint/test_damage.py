"""Damaged, foreign and malicious checkpoints: noticed, told, never executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wanma.checkpoint.format.manifest import Box, SavedShard, TensorEntry, dump_manifest
from wanma.checkpoint.load.reader import (
    find_defects,
    find_newest_valid,
    load_full_tensors,
    load_tensors,
    read_training_state,
)
from wanma.checkpoint.load.verification import find_valid
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.job.errors import WanmaError


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.layers.0.weight": torch.full((40, 10), float(step)),
        "model.layers.1.weight": torch.full((40, 10), float(-step)),
        "optimizer.step": torch.tensor(step),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of two ranks."""
    ranks = [Checkpointer(tmp_path, rank, 2) for rank in range(2)]
    for step in (1, 2, 3):
        for checkpointer in ranks:
            checkpointer.save(step, tensors(step), {"step": step})
    for checkpointer in ranks:
        checkpointer.close()
    return tmp_path


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_without_damage_the_newest_is_taken_without_a_word(folder: Path) -> None:
    messages: list[str] = []
    assert find_newest_valid(folder, messages.append) == folder / "step-00000003"
    assert messages == []


def test_a_flipped_bit_in_a_data_file_falls_back_and_names_the_file(folder: Path) -> None:
    flip_bit(folder / "step-00000003" / "rank-00001.safetensors", -1)
    messages: list[str] = []
    assert find_newest_valid(folder, messages.append) == folder / "step-00000002"
    assert messages == [
        "checkpoint step-00000003 is skipped: rank-00001.safetensors is damaged: "
        "its content differs from its SHA-256",
        "falling back to checkpoint step-00000002",
    ]


def test_every_kind_of_damage_is_skipped_with_its_reason(folder: Path) -> None:
    step = folder / "step-00000003"

    def reason() -> str:
        messages: list[str] = []
        assert find_newest_valid(folder, messages.append) == folder / "step-00000002"
        return messages[0].removeprefix("checkpoint step-00000003 is skipped: ")

    backup = folder.parent / "backup"
    shutil.copytree(step, backup)
    data, manifest = step / "rank-00000.safetensors", step / "manifest.json"

    data.unlink()
    assert reason() == "rank-00000.safetensors cannot be read: No such file or directory"
    data.write_bytes((backup / data.name).read_bytes()[:-1])
    assert "bytes instead of" in reason()
    shutil.copy(backup / data.name, data)
    manifest.write_text("{")
    assert reason() == "manifest.json is not the manifest of a checkpoint"
    manifest.write_bytes(b"")
    assert reason() == "manifest.json is not the manifest of a checkpoint"
    flip_bit_content = bytearray((backup / manifest.name).read_bytes())
    flip_bit_content[-20] ^= 1
    manifest.write_bytes(flip_bit_content)
    assert reason() == "manifest.json is damaged: its content differs from its SHA-256"
    manifest.write_bytes((backup / manifest.name).read_bytes().replace(b'"version":1', b'"version":9', 1))
    assert reason() == "manifest.json has format version 9; this version of wanma reads up to 2"
    manifest.unlink()
    assert reason() == "manifest.json cannot be read: No such file or directory"
    shutil.copy(backup / manifest.name, manifest)
    assert find_newest_valid(folder) == step


def test_when_all_are_damaged_there_is_none(folder: Path) -> None:
    for path in folder.iterdir():
        (path / "manifest.json").unlink()
    messages: list[str] = []
    assert find_newest_valid(folder, messages.append) is None
    assert len(messages) == 3


def test_whoever_takes_an_older_checkpoint_than_the_newest_is_told_and_a_step_insists(folder: Path) -> None:
    (folder / "step-00000003" / "rank-00000.safetensors").unlink()
    told: list[str] = []
    assert find_valid(folder, None, told.append) == folder / "step-00000002"
    assert told == [
        "checkpoint step-00000003 is skipped: "
        "rank-00000.safetensors cannot be read: No such file or directory\n"
        "  falling back to checkpoint step-00000002\n  give a step to load its checkpoint and no other"
    ]
    told.clear()
    assert find_valid(folder, 1, told.append) == folder / "step-00000001"
    for place, step, fact in (
        (folder, 3, r"step-00000003 .*\n .*another step: 2, 1"),
        (folder, 9, r"step 9\n .*steps 3, 2, 1"),
        (folder / "nothing", None, "no complete checkpoint yet"),
    ):
        with pytest.raises(WanmaError, match=fact):
            find_valid(place, step, told.append)
    assert told == []


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_newest_valid(tmp_path) is None
    assert find_newest_valid(tmp_path / "missing") is None


def test_ranks_can_share_the_hashing(folder: Path) -> None:
    path = folder / "step-00000003"
    flip_bit(path / "rank-00001.safetensors", -1)
    assert find_defects(path, share_index=0, share_count=2) == []
    assert len(find_defects(path, share_index=1, share_count=2)) == 1


def test_loading_a_damaged_checkpoint_directly_names_the_file(folder: Path) -> None:
    path = folder / "step-00000003"
    file = path / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(WanmaError, match=r"rank-00001\.safetensors cannot be read") as caught:
        load_full_tensors(path)
    assert caught.value.hint == "load an older checkpoint: this one is damaged"
    with pytest.raises(WanmaError, match="No such file"):
        read_training_state(folder / "step-00000099")


# ---------------------------------------------------------------- another model


def test_another_models_checkpoint_gives_one_error_and_changes_nothing(folder: Path) -> None:
    mine = {
        "model.layers.0.weight": torch.zeros(20, 10),
        "model.layers.1.weight": torch.zeros(40, 10, dtype=torch.bfloat16),
        "model.layer.0.weight": torch.zeros(3),
    }
    with pytest.raises(WanmaError) as caught:
        load_tensors(folder / "step-00000003", mine)
    assert caught.value.message.splitlines() == [
        f"checkpoint {folder / 'step-00000003'} is from another model; first differences:",
        "    model.layers.0.weight: shape (20, 10) here, (40, 10) in the checkpoint",
        "    model.layers.1.weight: dtype BF16 here, F32 in the checkpoint",
        "    model.layer.0.weight: not in the checkpoint. Did you mean 'model.layers.0.weight'?",
        "    optimizer.step: only in the checkpoint",
    ]
    assert "--run-dir" in caught.value.hint
    assert all(tensor.count_nonzero() == 0 for tensor in mine.values())


def test_only_the_first_differences_are_shown(folder: Path) -> None:
    with pytest.raises(WanmaError, match="and 18 more"):
        load_tensors(folder / "step-00000003", {f"x{number}": torch.zeros(1) for number in range(20)})


def test_weights_alone_load_when_asked_not_to_be_strict(folder: Path) -> None:
    mine = {"model.layers.0.weight": torch.zeros(40, 10)}
    state, _ = load_tensors(folder / "step-00000003", mine, strict=False)
    assert state == {"step": 3}
    assert mine["model.layers.0.weight"].unique().tolist() == [3.0]
    with pytest.raises(WanmaError, match=r"model\.bias"):
        load_tensors(folder / "step-00000003", {"model.bias": torch.zeros(1)}, strict=False)


def test_full_tensors_can_be_chosen_by_name(folder: Path) -> None:
    assert list(load_full_tensors(folder / "step-00000003", ["optimizer.step"])) == ["optimizer.step"]
    with pytest.raises(WanmaError, match=r"stp\. Did you mean 'optimizer\.step'"):
        load_full_tensors(folder / "step-00000003", ["optimizer.stp"])


# ---------------------------------------------------------------- malice


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


def touch_everything(path: Path, folder: Path) -> None:
    """All ways to read a checkpoint; errors are the reader's good right."""
    target = tensors(0)
    for attempt in (
        lambda: find_newest_valid(folder),
        lambda: find_defects(path),
        lambda: read_training_state(path),
        lambda: load_tensors(path, target),
        lambda: load_full_tensors(path),
        lambda: Checkpointer(folder),
    ):
        try:
            attempt()
        except WanmaError:
            continue


def test_a_malicious_pickle_in_any_file_runs_nothing(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path.parent / f"{tmp_path.name}-exploded"
    bomb = pickle.dumps(Bomb(mark))
    path = folder / "step-00000003"
    stray = [".metadata", "__0_0.distcp", "model.pt", "state.pkl", "rank_state.pkl", "optimizer.bin"]
    for name in stray:
        (path / name).write_bytes(bomb)
        (folder / name).write_bytes(bomb)
    touch_everything(path, folder)
    assert find_newest_valid(folder) == path  # what does not belong to it does not make it less whole
    for name in sorted(file.name for file in path.iterdir() if file.name not in stray):
        original = (path / name).read_bytes()
        for content in (bomb, bomb + original, original + bomb, original[:20] + bomb + original[20:]):
            (path / name).write_bytes(content)
            touch_everything(path, folder)
            assert find_newest_valid(folder) == folder / "step-00000002"
        (path / name).write_bytes(original)
    torch.save(Bomb(mark), path / "rank-00000.safetensors")
    touch_everything(path, folder)
    assert not mark.exists()
    pickle.loads(bomb)  # and the bomb was live
    assert mark.exists()


def test_a_forged_manifest_with_a_right_checksum_cannot_make_the_reader_overrun(folder: Path) -> None:
    path = folder / "step-00000003"
    manifest = read_manifest(path)
    name = "model.layers.0.weight"
    file = manifest.tensors[name].shards[0].file
    for shards in (
        (),  # nothing there
        (SavedShard(Box((0, 0), (20, 10)), file),),  # less than the file says
    ):
        forged = replace(manifest, tensors={**manifest.tensors, name: TensorEntry("F32", (40, 10), shards)})
        (path / "manifest.json").write_bytes(dump_manifest(forged))
        with pytest.raises(WanmaError, match=name) as caught:
            load_full_tensors(path)
        assert "damaged" in caught.value.hint
    header_only = json.dumps({name: {"dtype": "F32", "shape": [40, 10], "data_offsets": [0, 1600]}}).encode()
    (path / "manifest.json").write_bytes(dump_manifest(manifest))
    size = (path / file).stat().st_size
    (path / file).write_bytes((size - 8).to_bytes(8, "little") + header_only.ljust(size - 8))
    with pytest.raises(WanmaError, match="reaches outside the file"):
        load_full_tensors(path, [name])
