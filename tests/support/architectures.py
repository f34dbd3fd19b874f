"""Every causal architecture of the installed transformers, trained by wanma beside transformers itself.

    python -m support.architectures                # all of them, on all layouts
    python -m support.architectures llama granite  # some; a line of JSON for each
    python -m support.architectures --table lines  # of such lines: the table of docs/architectures.md

Each gets a tiny config in which nothing is neutral: multipliers, caps, scalings and dropout of every kind,
windows shorter than a sequence. What wanma refuses is mended as its error says, and tried again. What it
takes is trained from the same weights as transformers' own model with transformers' own loss.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.ranks import Outcome, run_ranks
from wanma.api.export import export
from wanma.job.errors import WanmaError
from wanma.job.plan import Plan
from wanma.job.run_directory import RunDirectory
from wanma.job.sections import Job, ModelSection
from wanma.job.worker import Worker
from wanma.job.write import to_toml
from wanma.models.build import model_spec

KINDS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTH, STEPS, SAMPLES, RATE, EPSILON = 16, 3, 4, 1e-2, 1e-3
TOLERANCE = 1e-6

LAYOUTS: dict[str, Plan] = {
    "1 rank": Plan(micro_batch=4),
    "dp 2": Plan(dp_shard=2, shard="parameters", micro_batch=1),
    "tp 2": Plan(tp=2, sequence=True, micro_batch=2),
    "tp 2, sequence whole": Plan(tp=2, sequence=False, micro_batch=2),
    "pp 2": Plan(pp=2, stage_cuts=(1,), micro_batch=1),
    "cp 2": Plan(cp=2, context="ring", micro_batch=2),
}
EDGES: dict[str, Plan] = {
    "pp 2, blocks last": Plan(pp=2, stage_cuts=(0,), micro_batch=1),
    "pp 2, blocks first": Plan(pp=2, stage_cuts=(4,), micro_batch=1),
    "pp 4": Plan(pp=2, virtual_stages=2, schedule="interleaved_1f1b", stage_cuts=(1, 2, 3), micro_batch=1),
}
"""Of the pipeline: stages without blocks, and several stages of a rank."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size",), 320),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "dim_ff", "mlp_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("max_sequence_length", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "encoder_layers"), 1),
    "num_key_value_heads": 2,
    "rotary_dim": 4,
    "qk_rope_head_dim": 4,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 0,
}
_SCALES: dict[str, Any] = {
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.61,
    "attention_multiplier": 0.23,
    "logit_scale": 0.37,
    "final_logit_softcapping": 3.0,
    "attn_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 24,
    "scale_embedding": True,
    "embedding_scale": 1.7,
    "lm_head_multiplier": 0.7,
    "scale_emb": 1.7,
    "use_qk_norm": True,
    "logits_soft_cap": 3.0,
    "routed_scaling_factor": 1.3,
    "attention_bias": True,
}
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
_KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
"""Of layers, which no cut of a pipeline shows in the same order."""
_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global"], 4]]},
    "minicpm3": {"num_key_value_heads": 4},
    "youtu": {"num_key_value_heads": 4},
    "diffllama": {"attention_dropout": 0.0},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(kind: str) -> dict[str, Any]:
    """A config of four small layers, in which what can be other than neutral is."""
    config = CONFIG_MAPPING[kind]()
    known = config.to_dict()
    tiny: dict[str, Any] = {"model_type": kind}
    for key, value in known.items():
        if key in _SIZES:
            tiny[key] = _SIZES[key]
        elif key in _SCALES:
            tiny[key] = _SCALES[key]
        elif "drop" in key and type(value) in (int, float):
            tiny[key] = 0.1
        elif key in _WINDOWS:
            tiny[key] = LENGTH // 2
    types = set(known.get("layer_types") or ())
    if types and types <= set(_KINDS):
        tiny["layer_types"] = _KINDS if "sliding_attention" in types else ["full_attention"] * 4
    return {**tiny, **_SPECIAL.get(kind, {})}


@dataclass
class Verdict:
    """What became of one architecture."""

    kind: str
    layouts: dict[str, str] = field(default_factory=dict)
    """Layout -> "equal", or "refused: ...", "wrong: ...", "failed: ..."."""
    remedies: list[str] = field(default_factory=list)
    """What was refused of the first config, and mended as the error says."""
    refusal: str | None = None
    """The error that no key of the config mends."""


def judge(kind: str, layouts: Mapping[str, Plan], folder: Path) -> Verdict:
    """Build, mend, and train one architecture."""
    verdict = Verdict(kind)
    try:
        config: dict[str, Any] = tiny_config(kind)
    except Exception as error:
        verdict.refusal = f"transformers: {_line(error)}"
        return verdict
    found = mend(config, verdict)
    if found is None:
        return verdict
    config, length = found
    # Dropout that wanma keys by sample is trained, but draws other numbers than transformers.
    config = {key: 0.0 if "drop" in key else value for key, value in config.items()}
    source = folder / "published"
    try:
        expected = _reference(config, source, length)
    except Exception as error:
        verdict.layouts = {name: f"failed: transformers' own: {_line(error)}" for name in layouts}
        return verdict
    try:
        run_ranks(_train, 2, (source, folder, length, dict(layouts)), seconds=90)
    except Exception as error:
        hung = f"failed: {_line(error)}"
    else:
        hung = "failed: not tried"
    for name in layouts:
        told = [json.loads(file.read_text()) for file in folder.glob(f"{name}/told-*.json")]
        # What was refused on one rank may be a lost peer on the other.
        reasons = sorted((reason for reason in told if reason is not None), key=lambda r: "refused" not in r)
        if len(told) < layouts[name].world_size:
            verdict.layouts[name] = next(iter(reasons), hung)
        elif reasons:
            verdict.layouts[name] = reasons[0]
        else:
            try:
                verdict.layouts[name] = expected.compare(Outcome(folder / name))
            except Exception as error:
                verdict.layouts[name] = f"failed: {_line(error)}"
    return verdict


def mend(config: dict[str, Any], verdict: Verdict) -> tuple[dict[str, Any], int] | None:
    """Apply what errors say until the model is built.

    Returns:
        the config and the sequence length; None where the last error names no key.
    """
    length = LENGTH
    for _ in range(6):
        try:
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(config))
                section = ModelSection(huggingface=folder)
                model_spec(section, vocabulary=257, sequence_length=length, image_shape=None, classes=None)
            return config, length
        except WanmaError as error:
            hint = error.hint or ""
            keys = re.search(r"model\.arguments = (\{.*\})", hint)
            shorter = re.search(r"data\.sequence_length to at most (\d+)", hint)
            if keys is None and (shorter is None or int(shorter[1]) < 2):
                verdict.refusal = f"{error.message}: {hint}"
                return None
            verdict.remedies.append(hint)
            if keys is not None:
                given = tomllib.loads(f"arguments = {keys[1]}")["arguments"]
                config = {**config, **{k: None if v == "null" else v for k, v in given.items()}}
            else:
                assert shorter is not None
                length = int(shorter[1])
        except Exception as error:
            verdict.refusal = f"failed: {_line(error)} {traceback.extract_tb(error.__traceback__)[-1]}"
            return None
    verdict.refusal = "failed: remedies lead in a circle"
    return None


class Tokens:
    """Sequences of tokens, each with its next one."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = torch.randint(3, 257, (SAMPLES, length + 1), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


@dataclass(frozen=True)
class _Reference:
    """Transformers' own training."""

    losses: list[float]
    weights: dict[str, Tensor]
    spread: float
    """Largest difference of a weight between transformers' own attentions, eager and torch's: some families
    compute in fp32 whatever the precision, and divide by what is small."""

    def compare(self, outcome: Outcome) -> str:
        apart = max(abs(a - b) for a, b in zip(self.losses, outcome.losses, strict=True))
        if apart > TOLERANCE * max(1.0, self.losses[0]):
            return f"wrong: losses {self.losses} and {outcome.losses}"
        job = Job.model_validate(json.loads((outcome.directory / "job.json").read_text()))
        (outcome.directory / "job.toml").write_text(to_toml(job))
        export(RunDirectory(outcome.directory), outcome.directory / "export")
        model = AutoModelForCausalLM.from_pretrained(outcome.directory / "export", dtype=torch.float64)
        weights = model.state_dict()
        if weights.keys() != self.weights.keys():
            return f"wrong: exported are not {sorted(weights.keys() ^ self.weights.keys())[:4]}"
        worst, name = max(
            (float((weights[n] - t).abs().max()), n) for n, t in self.weights.items() if t.numel()
        )
        if worst <= TOLERANCE:
            return "equal"
        if worst <= 3 * self.spread:
            return f"equal within {worst:.0e}"
        return f"wrong: {name} is off by {worst:.1e} (transformers' own attentions by {self.spread:.1e})"


def _reference(config: dict[str, Any], folder: Path, length: int) -> _Reference:
    """Write weights that are not neutral to `folder`, and train them as transformers does."""
    torch.manual_seed(3)
    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.05
            parameter.copy_(parameter + noise if parameter.ndim == 1 else parameter * 3 + noise / 5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    losses, weights = _train_plainly(folder, "eager", length)
    try:
        _, others = _train_plainly(folder, "sdpa", length)
    except ValueError:  # it has no such attention
        others = weights
    apart = (float((others[n] - tensor).abs().max()) for n, tensor in weights.items() if tensor.numel())
    return _Reference(losses, weights, max(apart))


def _train_plainly(folder: Path, attention: str, length: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of a loop without wanma."""
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"  # the others know no float64
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float64, attn_implementation=attention
    )
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    losses, rows = [], Tokens(length).rows
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def _train(worker: Worker, source: Path, folder: Path, length: int, layouts: dict[str, Plan]) -> None:
    """Train every layout in this process, one after the other, and note beside it what went wrong."""
    from wanma.training.main import Request, train

    torch.set_num_threads(1)
    base: Any = dist.TCPStore("127.0.0.1", worker.store_port, is_master=False)
    for number, (name, plan) in enumerate(layouts.items()):
        if worker.rank >= plan.world_size:
            continue
        directory = folder / name
        directory.mkdir(exist_ok=True)
        job = {
            "model": {"huggingface": str(source)},
            "data": {"sequence_length": length},
            "checkpoint": {"start_from": str(source), "every_steps": 0},
            "train": {
                "steps": STEPS,
                "global_batch": SAMPLES,
                "precision": "fp64",
                "learning_rate": RATE,
                "schedule": "constant",
                "epsilon": EPSILON,
                "weight_decay": 0.0,
                "gradient_clip": 0.0,
                "validation_samples": 2,
                "deterministic": True,
            },
            "parallel": {"collectives": "gloo"},
        }
        if worker.rank == 0:
            (directory / "job.json").write_text(json.dumps(job))
        mine = replace(
            worker,
            run_directory=directory,
            world_size=plan.world_size,
            local_world_size=plan.world_size,
            store=dist.PrefixStore(str(number), base),
        )
        try:
            data = (Tokens(length), Tokens(length))
            train(
                mine,
                Request(Job.model_validate(job), replace(plan, precision="fp64"), objects={"data": data}),
            )
            told = None
        except WanmaError as error:
            told = f"refused: {error.message}: {error.hint}"
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)
            here = next((f for f in reversed(at) if "wanma" in f.filename), at[-1])
            told = f"failed: {_line(error)} ({Path(here.filename).name}:{here.lineno})"
        (directory / f"told-{worker.rank}.json").write_text(json.dumps(told))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def sweep(kinds: Iterable[str], layouts: Mapping[str, Plan]) -> Iterator[Verdict]:
    """Verdicts, one by one."""
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="wanma-architecture-") as folder:
            yield judge(kind, layouts, Path(folder))


def table(verdicts: Iterable[Verdict]) -> str:
    """What became of each architecture, as Markdown: docs/architectures.md holds it."""
    names = [*LAYOUTS, *EDGES]
    lines = ["| architecture | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    refusals: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.refusal is not None:
            refusals.setdefault(short(verdict.refusal), []).append(verdict.kind)
            continue
        cells = [short(verdict.layouts[name]) for name in names]
        lines.append(f"| {verdict.kind} | " + " | ".join(cells) + " |")
    lines += ["", "| refused | reason |", "| --- | --- |"]
    lines += [f"| {', '.join(kinds)} | {reason} |" for reason, kinds in refusals.items()]
    return "\n".join(lines)


def short(told: str) -> str:
    """A verdict in some words."""
    told = told.removeprefix("model.huggingface: ").partition("\n")[0]
    for pattern, words in _WORDS.items():
        if re.search(pattern, told) is not None:
            return words
    return told.replace("|", "/")[:160]


_WORDS = {
    "^equal$": "✓",
    "has no matrix that may be split": "no plan",
    "does not say what .* does with a part of the sequence": "whole only",
    "its attention cannot be replaced": "its attention cannot be replaced",
    "routed experts are not those": "routed experts other than Mixtral's and Qwen3-MoE's",
    "has layers of .* \\(layer_types\\)": "layers that mix tokens in other ways than attention",
    "is an encoder with a decoder": "an encoder with a decoder",
    "has no (vocab_size|num_attention_heads|num_hidden_layers|hidden_size)": "no language model alone, or "
    "without attention",
    "^transformers cannot use the config|^transformers make no": "not tried: its configs cannot be made so "
    "small by rule",
    "wants what would be ignored": "its attention wants more (a cap, sinks, a mask of its own)",
    "was not handed the mask": "its blocks pass no keywords on",
    "cannot be run without data": "its forward looks at values",
    "holds another model than": "its weights are published in another form",
    "cannot be cut into stages|would hold nothing": "not cut",
    "does not declare its attention": "attention not found",
    "does not say how buffer": "its buffers begin in a way of their own",
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        rows = [Verdict(**json.loads(line)) for line in Path(sys.argv[2]).read_text().splitlines()]
        print(table(rows))
    else:
        for one in sweep(sys.argv[1:] or KINDS, {**LAYOUTS, **EDGES}):
            print(json.dumps(asdict(one)), flush=True)
