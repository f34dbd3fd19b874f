"""`wanma export`: a run's weights as transformers loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.huggingface import write_config
from support.ranks import Outcome, run_job
from support.text import text_job
from wanma.api.checkpoints.export import _other_files, export
from wanma.cli.main import main
from wanma.data.text.tokenizer import BytesTokenizer, load_tokenizer
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job


def trained(folder: Path, model: dict[str, Any], **train: Any) -> Outcome:
    """A short run, as `wanma train` leaves it."""
    keys = {"steps": 2, "global_batch": 2, "validation_samples": 2, **train}
    text = text_job(folder, model, text=Path(json.__file__).parent, checkpoint={}, **keys)
    outcome = run_job(folder / "runs" / "mine", text, Plan(micro_batch=2))
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(text)))
    return outcome


def test_the_command_writes_what_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "tie_embeddings": True}
    outcome = trained(tmp_path, {"family": "decoder", **sizes}, weight_average=0.5)
    to = tmp_path / "out"
    command = ["export", "mine", "--runs", str(tmp_path / "runs"), "--to", str(to), "--precision", "bf16"]
    assert main(command) == 0
    assert "averaged weights of step-00000002" in capsys.readouterr().out
    with safe_open(to / "model.safetensors", framework="pt") as opened:
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118  # no mapping
    model = AutoModelForCausalLM.from_pretrained(to)
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 16
    averaged = outcome.tensors()["average.embedding.weight"]
    assert torch.equal(model.get_input_embeddings().weight, averaged.to(torch.bfloat16))
    assert main(command) == 2
    assert f"{to} already exists" in capsys.readouterr().err


def test_commands_say_that_the_newest_checkpoint_is_damaged_and_refuse_it_by_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trained(tmp_path, {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2})
    damaged = outcome.directory / "checkpoints" / "step-00000003"
    shutil.copytree(outcome.directory / "checkpoints" / "step-00000002", damaged)
    (damaged / "rank-00000.safetensors").write_bytes(b"")
    run = ["mine", "--runs", str(tmp_path / "runs")]
    sampled = ["sample", *run, "--prompt", "a", "--tokens", "1"]
    place = str(outcome.directory)
    for command in (
        ["export", *run, "--to", str(tmp_path / "out")],
        sampled,
        ["checkpoint", "convert", place, str(tmp_path / "converted")],
    ):
        assert main(command) == 0
        told = capsys.readouterr().err
        assert told.startswith(
            "warning: checkpoint step-00000003 is skipped: rank-00000.safetensors has 0 bytes"
        )
        assert "checkpoint step-00000002" in told
    assert main([*sampled, "--step", "3"]) == 1
    assert "checkpoint step-00000003 is damaged" in capsys.readouterr().err
    assert main(["export", *run, "--step", "2", "--to", str(tmp_path / "two")]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_of_bytes_is_written_with_a_tokenizer_whose_numbers_are_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = trained(tmp_path, {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2})
    (outcome.directory / "tokenizer").mkdir()
    BytesTokenizer().save(outcome.directory / "tokenizer")
    command = ["export", "mine", "--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "out")]
    assert main(command) == 0
    assert "tokenizer.json was generated" in capsys.readouterr().out
    made = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("def f(x):\n\treturn  'é' + \"万马\"  \r\n", " a  b", "\x00\x7f"):
        numbers = made(text, add_special_tokens=False).input_ids
        assert numbers == list(text.encode())
        assert made.decode(numbers) == text
    assert (made.eos_token_id, len(made)) == (256, 257)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 256
    ours = load_tokenizer(tmp_path / "out")
    assert (ours.vocabulary_size, ours.end_of_document_id) == (257, 256)
    assert ours.encode("万马").tolist() == list("万马".encode())


@pytest.mark.parametrize(
    ("published", "exported"), [(None, 3), (1, 3), (3, 3), ([1, 3], [1, 3]), ([1, 2], 3)]
)
def test_an_export_names_the_end_of_document_that_was_trained(
    tmp_path: Path, published: int | list[int] | None, exported: int | list[int]
) -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "</s>": 2, "<stop>": 3}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    files = _other_files({"eos_token_id": published}, load_tokenizer(tmp_path))
    assert json.loads(files["config.json"])["eos_token_id"] == exported
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<stop>"


def test_a_checkpoint_is_converted_to_what_export_writes(tmp_path: Path) -> None:
    outcome = trained(tmp_path, {"family": "decoder", "layers": 1, "hidden": 16, "heads": 2})
    path = outcome.directory / "checkpoints" / "step-00000002"
    command = ["checkpoint", "convert", str(path), str(tmp_path / "converted"), "--format", "huggingface"]
    assert main(command) == 0
    export(RunDirectory(outcome.directory), tmp_path / "exported")
    files = sorted(file.name for file in (tmp_path / "exported").iterdir())
    assert "config.json" in files
    assert sorted(file.name for file in (tmp_path / "converted").iterdir()) == files
    for name in files:
        assert (tmp_path / "converted" / name).read_bytes() == (tmp_path / "exported" / name).read_bytes()


def test_adapters_are_added_to_the_weights_that_they_adapt(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "config", "gpt2")
    keys = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ["*.c_attn.key"]}
    outcome = trained(tmp_path, {"huggingface": str(folder), **keys})
    export(RunDirectory(outcome.directory), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    saved = outcome.tensors()
    at = "model.transformer.h.0.attn.c_attn.key"
    change = saved[f"{at}.lora_b"] @ saved[f"{at}.lora_a"] * 3.0
    assert change.abs().max() > 0
    fused = model.get_parameter("transformer.h.0.attn.c_attn.weight")
    assert torch.allclose(fused[:, 32:64].T, saved[f"{at}.weight"] + change, atol=1e-6)


def test_what_has_no_published_form_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"layers": 1, "hidden": 16, "heads": 2, "experts": 2, "experts_per_token": 1, "shared_experts": 1}
    trained(tmp_path, {"family": "decoder", **keys, "balance": "none"})
    command = ["export", "mine", "--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "out")]
    assert main(command) == 1
    assert "no supported Hugging Face family" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_had_no_part_in_the_run_does_not_matter(tmp_path: Path) -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 16}
    text: dict[str, Any] = {
        "model": {"family": "decoder", **sizes},
        "data": {"factory": "support.own:PartlyLabelled", "sequence_length": 6},
        "train": {"steps": 1, "global_batch": 2, "validation_samples": 2},
    }
    outcome = run_job(tmp_path / "run", text, Plan(micro_batch=2))
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(text)))
    made = export(RunDirectory(outcome.directory), tmp_path / "out")
    assert made.tensors == len([name for name in outcome.tensors() if name.startswith("model.")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == 16
