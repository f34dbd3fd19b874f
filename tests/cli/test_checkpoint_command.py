"""`wanma checkpoint` on folders as a training leaves them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from wanma.checkpoint.load.reader import load_full_tensors
from wanma.checkpoint.remote.uploader import Uploader
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.cli.main import main
from wanma.job.errors import EXIT_USAGE
from wanma.job.file.loading import to_job
from wanma.job.file.serialization import job_to_toml
from wanma.job.run.run_directory import RunDirectory


def weights(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((40, 10), 2.0 + step / 100),
        "model.b": torch.ones(10),
        "optimizer.a": torch.full((40, 10), 0.5),
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Two ranks, steps 100 and 200; the first is the best, the second was uploaded, a third is unfinished."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("runs/gpt"))
    run.create()
    run.job.write_text(job_to_toml(to_job({"model": {"preset": "gpt-1m"}})))
    ranks = [Checkpointer(run.checkpoints, rank, 2) for rank in range(2)]
    for step, metric in ((100, 1.25), (200, 1.5)):
        for checkpointer in ranks:
            checkpointer.save(step, weights(step), {"step": step, "samples": 8 * step}, metric=metric)
    for checkpointer in ranks:
        checkpointer.close()
    (run.checkpoints / "step-00000300.partial-0-3").mkdir()
    uploader = Uploader(run.checkpoints, f"file://{tmp_path}/there")
    uploader.request(200)
    assert uploader.wait(30)
    (run.checkpoints / "step-00000100" / "manifest.json").touch()
    hour_ago = time.time() - 3600
    os.utime(run.checkpoints / "step-00000100" / "manifest.json", (hour_ago, hour_ago))
    return run


def step(run: RunDirectory, number: int) -> Path:
    return run.checkpoints / f"step-{number:08d}"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_list_shows_each_with_what_is_known_of_it(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "runs/gpt/checkpoints"
    assert lines[1].split() == ["step", "age", "bytes", "whole", "metric", "layout", "uploaded"]
    assert lines[2].split()[:2] == ["300", "–"]
    assert "no: not complete" in lines[2]
    url = f"file://{tmp_path}/there"
    rest = "".join(line.strip() for line in lines[3:])
    assert rest.count(url[:20]) == 2
    assert "2 ranks, 2 files" in lines[3]
    assert "best" not in lines[3]
    hundred = next(line for line in lines if line.startswith(" 100"))
    assert "1 h 00 min" in hundred
    assert "1.250  best" in hundred
    assert "yes" in hundred


def test_list_as_json_of_a_folder_and_of_a_url(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list", str(run.checkpoints), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["step"], entry["problem"], entry["is_best"]) for entry in found] == [
        (300, "not complete", False),
        (200, None, False),
        (100, None, True),
    ]
    assert found[1]["uploaded"] == f"file://{tmp_path}/there"
    assert (found[1]["world_size"], found[1]["files"], found[1]["tensors"]) == (2, 2, 3)
    assert main(["checkpoint", "list", f"file://{tmp_path}/there", "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert [(entry["step"], entry["problem"], entry["metric"]) for entry in there] == [
        (200, None, 1.5),
        (100, None, 1.25),
    ]
    (tmp_path / "there" / "step-00000200" / "rank-00001.safetensors").unlink()
    (tmp_path / "there" / "step-00000100" / "manifest.json").unlink()
    main(["checkpoint", "list", f"file://{tmp_path}/there", "--json"])
    there = json.loads(capsys.readouterr().out)
    assert [entry["problem"] for entry in there] == ["rank-00001.safetensors is missing", "not complete"]


def test_a_step_saved_again_since_its_upload_is_not_said_to_be_there(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with Checkpointer(run.checkpoints) as checkpointer:
        checkpointer.save(200, weights(7), {"step": 200})
    main(["checkpoint", "list", "gpt", "--json"])
    found = {entry["step"]: entry["uploaded"] is None for entry in json.loads(capsys.readouterr().out)}
    assert found == {200: True, 100: False}


def test_verify_says_whole_and_exits_with_0(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", "gpt"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("step-00000200  whole  3 tensors in 2 files, ")
    assert len(out) == 2


def test_verify_lists_all_damage_and_exits_with_1(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(2):
        damage(step(run, 200) / f"rank-0000{rank}.safetensors")
    assert main(["checkpoint", "verify"]) == 1
    assert capsys.readouterr().out.splitlines()[:3] == [
        "step-00000200  damaged",
        "  rank-00000.safetensors: is damaged: its content differs from its SHA-256",
        "  rank-00001.safetensors: is damaged: its content differs from its SHA-256",
    ]
    assert main(["checkpoint", "verify", str(step(run, 100))]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "verify", "gpt", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["whole"], len(one["problems"])) for one in found] == [
        ("step-00000200", False, 2),
        ("step-00000100", True, 0),
    ]
    there = f"file://{tmp_path}/there"
    assert main(["checkpoint", "verify", there]) == 0
    damage(tmp_path / "there" / "step-00000100" / "rank-00000.safetensors")
    assert main(["checkpoint", "verify", there]) == 1
    assert main(["checkpoint", "verify", f"{there}/step-00000100"]) == 1
    assert main(["checkpoint", "verify", f"{there}/step-00000200"]) == 0


def test_diff_shows_tensors_and_state(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(step(run, 100)), "gpt"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "A: runs/gpt/checkpoints/step-00000100",
        "B: runs/gpt/checkpoints/step-00000200",
        "tensor kind differing largest relative",
        "model.a F32 [40, 10] 400 1.000 0.3333",
        "2 tensors equal, 1 differ",
        "state A B",
        "step 100 200",
        "metric 1.25 1.5",
        "samples 800 1600",
    ]
    assert main(["checkpoint", "diff", "gpt", "gpt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] == 3


def test_convert_makes_one_file_and_leaves_the_source(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "convert", "gpt", "out"]) == 0
    assert capsys.readouterr().out.startswith("out: 3 tensors, ")
    assert sorted(file.name for file in Path("out").iterdir()) == ["manifest.json", "rank-00000.safetensors"]
    assert main(["checkpoint", "diff", str(step(run, 200)), "out"]) == 0
    assert main(["checkpoint", "verify", "gpt"]) == 0
    assert main(["checkpoint", "convert", "gpt", "out"]) == EXIT_USAGE
    assert "out already exists" in capsys.readouterr().err


def test_convert_changes_the_precision_of_weights_alone(run: RunDirectory) -> None:
    assert main(["checkpoint", "convert", "gpt", "out", "--precision", "bf16"]) == 0
    found = load_full_tensors(Path("out"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "model.a": torch.bfloat16,
        "model.b": torch.bfloat16,
        "optimizer.a": torch.float32,
    }
    assert main(["checkpoint", "convert", "gpt", "weights", "--weights"]) == 0
    assert sorted(load_full_tensors(Path("weights"))) == ["model.a", "model.b"]


def test_convert_to_plain_safetensors_names_weights_as_the_model_does(run: RunDirectory) -> None:
    command = ["checkpoint", "convert", str(step(run, 100)), "out", "--format", "safetensors"]
    assert main([*command, "--precision", "fp16"]) == 0
    assert [file.name for file in Path("out").iterdir()] == ["model.safetensors"]
    found = load_file("out/model.safetensors")
    assert found.keys() == {"a", "b"}
    assert torch.equal(found["a"], torch.full((40, 10), 3.0, dtype=torch.float16))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["convert", "gpt", "out", "--format", "safetensors", "--files", "2"], "--files needs --format"),
        (["convert", "gpt", "out", "--files", "0"], "the number of files is 0"),
        (["verify", "elsewhere"], "there is no run 'elsewhere'"),
        (["verify", "runs/gpt/logs"], "'runs/gpt/logs' is a folder"),
        (["diff", "gpt", "s3:///"], "is not on this node"),
        (["list", "ftp://me:hunter2@host/run"], "credentials"),
        (["list", "gpt", "--jsno"], "wanma checkpoint list: unknown option --jsno. Did you mean '--json'?"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    assert main(["checkpoint", *command]) == EXIT_USAGE
    error = capsys.readouterr().err
    assert message in error
    assert "hunter2" not in error
    assert not Path("out").exists()


def test_a_damaged_source_is_not_converted(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    damage(step(run, 200) / "rank-00000.safetensors")
    for form in ("checkpoint", "safetensors", "huggingface"):
        assert main(["checkpoint", "convert", str(step(run, 200)), "out", "--format", form]) == 1
        assert "rank-00000.safetensors is damaged" in capsys.readouterr().err
        assert not Path("out").exists()


def test_a_run_without_checkpoints_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    empty = RunDirectory(Path("runs/empty"))
    empty.create()
    empty.job.write_text(run.job.read_text())
    assert main(["checkpoint", "list", "empty"]) == 0
    assert capsys.readouterr().out == "no checkpoints in runs/empty/checkpoints yet\n"
    assert main(["checkpoint", "verify", "empty"]) == EXIT_USAGE
