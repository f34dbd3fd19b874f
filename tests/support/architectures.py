"""Every causal architecture of the installed transformers, trained by wanma beside transformers itself.

    python -m support.architectures                # all of them, on all layouts
    python -m support.architectures llama granite  # some; a line of JSON for each
    python -m support.architectures --table lines  # of such lines: docs/reference/architectures.md

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
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.ranks import Outcome, run_ranks
from support.text import text_spec
from support.tiny_config import LENGTH, tiny_config
from wanma.api.checkpoints.export import export
from wanma.job.errors import WanmaError
from wanma.job.file.serialization import job_to_toml
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection

KINDS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
STEPS, SAMPLES, RATE, EPSILON = 3, 4, 1e-2, 1e-3
TOLERANCE = 1e-6

LAYOUTS: dict[str, Plan] = {
    "1 rank": Plan(micro_batch=4),
    "dp 2": Plan(dp_shard=2, shard="parameters", micro_batch=1),
    "tp 2": Plan(tp=2, sequence_parallel=True, micro_batch=2),
    "tp 2, sequence whole": Plan(tp=2, sequence_parallel=False, micro_batch=2),
    "pp 2": Plan(pp=2, stage_cuts=(1,), micro_batch=1),
    "cp 2": Plan(cp=2, cp_method="ring", micro_batch=2),
}
EDGES: dict[str, Plan] = {
    "pp 2, blocks last": Plan(pp=2, stage_cuts=(0,), micro_batch=1),
    "pp 2, blocks first": Plan(pp=2, stage_cuts=(4,), micro_batch=1),
    "pp 4": Plan(pp=2, virtual_stages=2, schedule="interleaved_1f1b", stage_cuts=(1, 2, 3), micro_batch=1),
}
"""Pipelines with stages without blocks, and with several stages a rank."""


@dataclass
class Verdict:
    """Result of one architecture."""

    kind: str
    layouts: dict[str, str] = field(default_factory=dict)
    """Layout -> "equal", or "refused: ...", "wrong: ...", "failed: ..."."""
    remedies: list[str] = field(default_factory=list)
    """Part of the first config that was refused, mended as the error says."""
    refusal: str | None = None
    """The error that no key of the config mends."""


def judge(kind: str, layouts: Mapping[str, Plan], folder: Path) -> Verdict:
    """Build, mend, and train one architecture."""
    return judge_together({kind: layouts}, folder)[0]


def judge_together(wanted: Mapping[str, Mapping[str, Plan]], folder: Path) -> list[Verdict]:
    """Build, mend, and train some architectures in one launch of ranks.

    Args:
        wanted: architecture -> its layouts.
    """
    runs: list[_Run] = []
    verdicts: list[Verdict] = []
    for kind, layouts in wanted.items():
        verdict = Verdict(kind)
        verdicts.append(verdict)
        try:
            config: dict[str, Any] = tiny_config(kind)
        except Exception as error:
            verdict.refusal = f"transformers: {_line(error)}"
            continue
        found = mend(config, verdict)
        if found is None:
            continue
        config, length = found
        # Dropout that wanma keys by sample is trained, but draws other numbers than transformers.
        config = {key: 0.0 if "drop" in key else value for key, value in config.items()}
        try:
            expected = _reference(config, folder / kind / "published", length)
        except Exception as error:
            verdict.layouts = {name: f"failed: transformers' own: {_line(error)}" for name in layouts}
            continue
        runs.append(_Run(verdict, expected, folder / kind, length, dict(layouts)))
    hung = "failed: not tried"
    try:
        if runs:
            given = [(run.folder, run.length, run.layouts) for run in runs]
            run_ranks(_train, 2, (given,), seconds=300, is_reused=True)
    except Exception as error:
        hung = f"failed: {_line(error)}"
    for run in runs:
        run.compare(hung)
    return verdicts


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
                text_spec(section, sequence_length=length)
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

    folder: Path
    length: int
    losses: list[float]
    weights: dict[str, Tensor]

    def compare(self, outcome: Outcome) -> str:
        apart = max(abs(a - b) for a, b in zip(self.losses, outcome.losses, strict=True))
        if apart > TOLERANCE * max(1.0, self.losses[0]):
            return f"wrong: losses {self.losses} and {outcome.losses}"
        job = Job.model_validate(json.loads((outcome.directory / "job.json").read_text()))
        (outcome.directory / "job.toml").write_text(job_to_toml(job))
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

    @cached_property
    def spread(self) -> float:
        """Largest difference of a weight between transformers' own attentions, eager and torch's: some
        families compute in fp32 whatever the precision, and divide by what is small."""
        try:
            _, others = _train_plainly(self.folder, "sdpa", self.length)
        except ValueError:  # it has no such attention
            return 0.0
        return max(
            float((others[n] - tensor).abs().max()) for n, tensor in self.weights.items() if tensor.numel()
        )


@dataclass(frozen=True)
class _Run:
    """One architecture that ranks train."""

    verdict: Verdict
    expected: _Reference
    folder: Path
    length: int
    layouts: dict[str, Plan]

    def compare(self, hung: str) -> None:
        """Write verdicts of all layouts.

        Args:
            hung: verdict of a layout that was not trained to its end.
        """
        for name, plan in self.layouts.items():
            told = [json.loads(file.read_text()) for file in self.folder.glob(f"{name}/told-*.json")]
            # What was refused on one rank may be a lost peer on the other.
            reasons = sorted((r for r in told if r is not None), key=lambda reason: "refused" not in reason)
            if len(told) < plan.world_size:
                verdict = next(iter(reasons), hung)
            elif reasons:
                verdict = reasons[0]
            else:
                try:
                    verdict = self.expected.compare(Outcome(self.folder / name))
                except Exception as error:
                    verdict = f"failed: {_line(error)}"
            self.verdict.layouts[name] = verdict


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
    return _Reference(folder, length, *_train_plainly(folder, "eager", length))


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


def _train(worker: WorkerContext, runs: list[tuple[Path, int, dict[str, Plan]]]) -> None:
    """Train every layout in this process, one after the other, and note beside it what went wrong.

    Args:
        runs: folder, sequence length and layouts of each architecture.
    """
    torch.set_num_threads(1)
    base: Any = dist.TCPStore("127.0.0.1", worker.store_port, is_master=False)
    every = [(folder, length, name) for folder, length, layouts in runs for name in layouts]
    plans = {folder: layouts for folder, _, layouts in runs}
    for number, (folder, length, name) in enumerate(every):
        plan = plans[folder][name]
        if worker.rank >= plan.world_size:
            continue
        directory = folder / name
        directory.mkdir(exist_ok=True)
        job = _job(folder / "published", length)
        if worker.rank == 0:
            (directory / "job.json").write_text(json.dumps(job))
        mine = replace(
            worker,
            run_directory=directory,
            world_size=plan.world_size,
            local_world_size=plan.world_size,
            store=dist.PrefixStore(str(number), base),
        )
        told = _train_layout(mine, job, plan, length)
        (directory / f"told-{worker.rank}.json").write_text(json.dumps(told))


def _job(source: Path, length: int) -> dict[str, Any]:
    return {
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


def _train_layout(worker: WorkerContext, job: dict[str, Any], plan: Plan, length: int) -> str | None:
    """Train one layout.

    Returns:
        what went wrong.
    """
    from wanma.training.loop.train_worker import TrainRequest, train

    data = (Tokens(length), Tokens(length))
    try:
        train(
            worker,
            TrainRequest(
                Job.model_validate(job), replace(plan, precision="fp64"), user_objects={"data": data}
            ),
        )
    except WanmaError as error:
        return f"refused: {error.message}: {error.hint}"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        here = next((f for f in reversed(at) if "wanma" in f.filename), at[-1])
        return f"failed: {_line(error)} ({Path(here.filename).name}:{here.lineno})"
    return None


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def sweep(kinds: Iterable[str], layouts: Mapping[str, Plan]) -> Iterator[Verdict]:
    """Verdicts, one by one."""
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="wanma-architecture-") as folder:
            yield judge(kind, layouts, Path(folder))


def table(verdicts: Iterable[Verdict]) -> str:
    """Table of each architecture's result in Markdown: docs/reference/architectures.md holds it."""
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
    told = told.removeprefix("model.huggingface: ")
    for pattern, words in _WORDS.items():
        if re.search(pattern, told) is not None:
            return words
    return told.replace("|", "/")[:160]


_WORDS = {
    "^equal$": "✓",
    "has no matrix that (can|may) be split": "no plan",
    "does not (say what|declare how) .* a part of the sequence": "whole only",
    "does not use the attention interface": "its attention cannot be replaced",
    "routed experts are not those": "routed experts other than Mixtral's and Qwen3-MoE's",
    "has layers of .* \\(layer_types\\)": "layers that mix tokens in other ways than attention",
    "is an encoder-decoder": "an encoder with a decoder",
    "has no (vocab_size|num_attention_heads|num_hidden_layers|hidden_size)": "no language model alone, or "
    "without attention",
    "^transformers rejects the config|^transformers cannot build": "not tried: its configs cannot be made so "
    "small by rule",
    "uses unsupported attention options": "its attention wants more (a cap, sinks, a mask of its own)",
    "receives no attention mask": "its blocks pass no keywords on",
    "the shape analysis of .* failed": "its forward looks at values",
    "layer_scalar: not in this model": "its files hold buffers",
    "does not match the model": "its weights are published in another form",
    "cannot be split into (pipeline )?stages|would be empty": "not cut",
    "layers of .* differ in": "its layers differ in heads",
    "does not declare its attention": "attention not found",
    "does not initialize buffer": "its buffers begin in a way of their own",
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        rows = [Verdict(**json.loads(line)) for line in Path(sys.argv[2]).read_text().splitlines()]
        print(table(rows))
    else:
        for one in sweep(sys.argv[1:] or KINDS, {**LAYOUTS, **EDGES}):
            print(json.dumps(asdict(one)), flush=True)
