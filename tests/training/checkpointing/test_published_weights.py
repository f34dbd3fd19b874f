"""Starting from published weights and writing them again: what transformers wrote, and what it reads."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from support.huggingface import write_config
from support.ranks import Outcome, run_here, run_job, run_ranks
from support.text import text_job, text_spec
from wanma.api.checkpoints.export import export
from wanma.checkpoint.conversion import huggingface_weights as files
from wanma.checkpoint.conversion.huggingface_weights import INDEX_FILE, HuggingFaceWeights
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.models.architectures.decoder import Decoder
from wanma.models.model_spec import build_model

_SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocabulary": 320}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}

DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"family": "decoder", **_SIZES}, {"rms_norm_eps": 1e-5}),
    "arcee": ({"family": "decoder", **_SIZES, "activation_function": "gelu"}, {"rms_norm_eps": 1e-5}),
    "qwen2": ({"preset": "qwen-2.5-0.5b", **_SIZES}, {"rope_parameters": _ROPE}),
    "qwen3": ({"preset": "qwen-3-8b", **_SIZES}, {"rope_parameters": _ROPE, "head_dim": 128}),
    "mixtral": (
        {"family": "decoder", **_SIZES, "experts": 4, "experts_per_token": 2, "balance": "none"},
        {"rms_norm_eps": 1e-5, "rope_parameters": {**_ROPE, "rope_theta": 1e4}, "sliding_window": None},
    ),
}
"""Family -> a decoder of ours, and what makes the config of `support.huggingface` the same."""


def publish(folder: Path, family: str, shard: str = "20KB", **changed: Any) -> Any:
    """A model of transformers with random weights, and the folder that it writes, in several files."""
    config = AutoConfig.from_pretrained(write_config(folder / "config", family, **changed))
    config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases and norms too
    model.save_pretrained(folder / "published", max_shard_size=shard)
    return model.eval()


def job(folder: Path, model: dict[str, Any], start: Path) -> dict[str, Any]:
    """One step that changes nothing."""
    train = {"steps": 1, "global_batch": 4, "learning_rate": 1e-30, "weight_decay": 0.0}
    train |= {"validation_samples": 2, "deterministic": True}
    return text_job(folder, model, checkpoint={"every_steps": 0, "start_from": str(start)}, **train)


def exported(outcome: Outcome, text: dict[str, Any], folder: Path) -> Any:
    """The run's weights as transformers loads them."""
    (outcome.directory / "job.toml").write_text(job_to_toml(Job.model_validate(text)))
    export(RunDirectory(outcome.directory), folder, file_bytes=20_000)
    assert (folder / INDEX_FILE).is_file()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def same_model(one: Any, other: Any) -> None:
    expected, got = one.state_dict(), other.state_dict()
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, got[name]), name
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(other(tokens).logits, one(tokens).logits, atol=1e-6)


PLANS = {
    "llama": Plan(dp_shard=2, shard="parameters", micro_batch=2),
    "qwen2": Plan(pp=2, micro_batch=2),
    "qwen3_moe": Plan(tp=2, micro_batch=2),
    "gpt2": Plan(tp=2, pp=2, micro_batch=2),
}


@pytest.mark.parametrize("family", PLANS)
@pytest.mark.daily("llama", "qwen3_moe")
def test_what_transformers_wrote_it_reads_again_unchanged(family: str, tmp_path: Path) -> None:
    original = publish(tmp_path, family)
    text = job(tmp_path, {"huggingface": str(tmp_path / "config")}, tmp_path / "published")
    outcome = run_job(tmp_path / "run", text, PLANS[family])
    same_model(original, exported(outcome, text, tmp_path / "exported"))


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.daily("arcee", "qwen2", "qwen3", "mixtral")
def test_our_decoder_starts_from_published_weights_and_is_published_again(
    family: str, tmp_path: Path
) -> None:
    model, changed = DECODERS[family]
    original = publish(tmp_path, family, **changed)
    text = job(tmp_path, model, tmp_path / "published")
    outcome = run_job(tmp_path / "run", text, Plan(dp_shard=2, shard="parameters", micro_batch=2))
    ours = decoder(model, outcome)
    tokens = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), original(tokens).logits, atol=1e-5)
    same_model(original, exported(outcome, text, tmp_path / "exported"))


def decoder(model: dict[str, Any], outcome: Outcome) -> Decoder:
    """Ours, with a run's weights."""
    made = build_model(text_spec(model), seed=7)
    assert isinstance(made, Decoder)
    saved = {n.removeprefix("model."): t for n, t in outcome.tensors().items() if n.startswith("model.")}
    missing, unexpected = made.load_state_dict(saved, strict=False)
    assert (missing, unexpected) == (["head.weight"] if made.parallel_spec.tied_parameters else [], [])
    return made.eval()


def read_counting(worker: WorkerContext, folder: Path, plan: Plan) -> tuple[int, int, int]:
    """Bytes that a rank reads, most of them that it holds at once, and bytes of its parameters."""
    from wanma.checkpoint.format.local_shards import local_tensor
    from wanma.parallel.mesh.parallel_mesh import open_mesh
    from wanma.parallel.parallelize import parallelize
    from wanma.training.checkpointing import published_weights

    held, peak = 0, 0

    class Counting(HuggingFaceWeights):
        def read(self, *box: Any) -> Tensor:
            nonlocal held, peak
            part = super().read(*box)
            size = part.numel() * part.element_size()
            held += size
            peak = max(peak, held)
            weakref.finalize(part, release, size)
            return part

    def release(size: int) -> None:
        nonlocal held
        held -= size

    spec = text_spec({"huggingface": str(folder / "config")})
    with (
        patch.multiple(published_weights, HuggingFaceWeights=Counting, READ_CHUNK_BYTES=1 << 10),
        open_mesh(worker, plan, 60.0) as grid,
    ):
        parallel = parallelize(spec, plan, grid, 1)
        for part in parallel.model_parts:
            part.initialize_parameter = None  # type: ignore[assignment]  # nothing is drawn to be replaced
        parallel.initialize_parameters(published_weights.huggingface_parameter_names(parallel))
        read = published_weights.load_huggingface_weights(parallel, folder / "published", worker)
        parts = [local_tensor(parameter) for _, parameter in parallel.named_parameters()]
    return read, peak, sum(part.numel() * 4 for part in parts)


@pytest.mark.parametrize(
    "plan",
    [Plan(dp_shard=2, shard="parameters"), Plan(tp=2), Plan(pp=2)],
    ids=["zero 3", "tensor", "pipeline"],
)
def test_a_rank_reads_its_own_part_and_holds_little_of_the_files(plan: Plan, tmp_path: Path) -> None:
    original = publish(tmp_path, "llama")
    whole = sum(parameter.numel() * 4 for parameter in original.parameters())
    ranks = run_ranks(read_counting, 2, (tmp_path, plan), is_reused=True)
    for read, held, own in ranks:
        assert read == own  # nothing twice, nothing that is another rank's
        assert held <= 1 << 10
    assert whole <= sum(own for *_, own in ranks) <= 1.02 * whole  # norms are on both tensor ranks


def damage(folder: Path, change: Any) -> None:
    """Rewrite the published tensors."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_differs_is_told_in_one_error(tmp_path: Path) -> None:
    publish(tmp_path, "llama", shard="1GB")
    text = job(tmp_path, {"huggingface": str(tmp_path / "config")}, tmp_path / "published")

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norms.weight"] = tensors.pop("model.norm.weight")
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:300].clone()

    damage(tmp_path / "published", change)
    settings = tmp_path / "published" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "rms_norm_eps": 0.5}))
    with pytest.raises(files.WanmaError) as raised:
        run_here(tmp_path / "run", text, Plan(micro_batch=4))
    told = str(raised.value)
    assert "rms_norm_eps: 1e-06 here, 0.5" in told
    assert "Did you mean 'model.norms.weight'?" in told
    assert "lm_head.weight: shape (320, 32) here" in told
    assert "model.norms.weight: not in this model" in told


def test_two_tensors_where_the_model_ties_one_are_refused_unless_equal(tmp_path: Path) -> None:
    publish(tmp_path, "qwen2", shard="1GB")
    text = job(tmp_path, {"huggingface": str(tmp_path / "config")}, tmp_path / "published")
    embedding = "model.embed_tokens.weight"
    damage(tmp_path / "published", lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    run_here(tmp_path / "equal", text, Plan(micro_batch=4))
    damage(tmp_path / "published", lambda t: t.update({"lm_head.weight": t[embedding] + 1}))
    with pytest.raises(files.WanmaError, match=r"model\.embed_tokens\.weight"):
        run_here(tmp_path / "unequal", text, Plan(micro_batch=4))


def test_an_index_may_not_name_files_elsewhere(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(files.WanmaError, match=r"names .*'\.\./other\.safetensors'"):
        HuggingFaceWeights(tmp_path)
