"""Loading of a trained model as a plain module in this process, whatever its layout (`wanma.load`)."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from wanma.api.checkpoints.generation import SamplingRule, generate_continuation
from wanma.checkpoint.format.manifest import Box
from wanma.checkpoint.load.reader import CheckpointReader, read_training_state
from wanma.checkpoint.load.verification import find_valid
from wanma.data.interactions.admitted_ids import TABLE_IDS, AdmittedIds
from wanma.data.interactions.log_files import MAX_RAW_ID
from wanma.data.text.tokenizer import Tokenizer, load_tokenizer
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError, first_lines
from wanma.job.file.loading import load_recorded_job
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.job import Job
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import InteractionSizes
from wanma.models.config.resolution import input_kind

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from wanma.api.checkpoints.unrounded_weights import UnroundedWeights
    from wanma.models.model_spec import ModelSpec

_MAX_NAMED = 4
"""Maximum tensors named in one message."""


@dataclass(frozen=True)
class Loaded:
    """Trained model with its tokenizer, job and step."""

    model: nn.Module
    """Plain module in evaluation mode, with the trained weights."""
    tokenizer: Tokenizer | None
    """Tokenizer of the run's text; None for a run that read none."""
    config: Job
    """Job with which the run was trained."""
    step: int
    """Optimizer steps that the weights were trained for."""
    checkpoint: Path
    averaged: bool
    """True if the weights are averaged ones (train.weight_average)."""
    admitted_ids: Mapping[str, AdmittedIds] = field(default_factory=dict)
    """Ids with rows of their own, by embedding table that admits ids (data.interactions.admit_rows)."""

    def __repr__(self) -> str:
        averaged = ", averaged weights" if self.averaged else ""
        return f"<{type(self.model).__name__} of step {self.step}{averaged}, {self.checkpoint}>"

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's output."""
        return self.model(*inputs, **keywords)

    @overload
    def sample(
        self,
        prompt: str,
        tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
    ) -> str: ...
    @overload
    def sample(
        self,
        prompt: list[str] | tuple[str, ...],
        tokens: int = ...,
        *,
        temperature: float = ...,
        top_k: int = ...,
        top_p: float = ...,
        seed: int = ...,
    ) -> list[str]: ...
    def sample(
        self,
        prompt: str | list[str] | tuple[str, ...],
        tokens: int = 200,
        *,
        temperature: float = SamplingRule.temperature,
        top_k: int = SamplingRule.top_k,
        top_p: float = SamplingRule.top_p,
        seed: int = SamplingRule.seed,
    ) -> str | list[str]:
        """Generate the continuation of a prompt, or of each of several, without the prompt itself.

        Args:
            prompt: one prompt, or several; number n (from 0) of several draws by `seed` + n.
            tokens: maximum tokens to generate; fewer if the model ends its document.
            temperature: 0 draws always the likeliest token.
            top_k: draw from that many likeliest tokens; 0: all.
            top_p: draw from the likeliest tokens with this total probability; 1: all.
            seed: seed of the first prompt's draws.

        Raises:
            WanmaError: the model writes no text.
        """
        rule = SamplingRule(temperature, top_k, top_p, seed)
        if isinstance(prompt, str):
            return "".join(self._stream(prompt, tokens, rule))
        rules = (replace(rule, seed=seed + number) for number in range(len(prompt)))
        return ["".join(self._stream(text, tokens, rule)) for text, rule in zip(prompt, rules, strict=True)]

    def recommend(
        self, user: int, items: int = 10, *, exclude: Iterable[int] = ()
    ) -> list[tuple[int, float]]:
        """Return the ids of the items with the highest scores for a user, best first, each with its score.

        Args:
            user: id of the user.
            items: maximum number of items.
            exclude: ids of items to leave out, such as those that the user has seen.

        Raises:
            WanmaError: the model does not rank items, or an id is outside its table.
        """
        import torch

        from wanma.models.recommender.pair_models import PairModel

        if not isinstance(self.model, PairModel):
            raise WanmaError(
                f"{self.checkpoint.parent.parent} trained {type(self.model).__name__}, which ranks no items",
                "give a run of model.kind = 'matrix_factorization' or 'two_tower'",
            )
        config = self.model.config
        known = self.admitted_ids.get(config.item)
        shared_rows = known.shared if known is not None else 0
        left_out = {*range(shared_rows), *self.rows(config.item, exclude).tolist()}
        device = next(self.model.parameters()).device
        with torch.no_grad():
            scores = self.model.scores_of_all_items(self.rows(config.user, [user]).to(device))[0]
            scores[sorted(left_out)] = float("-inf")
            best = scores.topk(min(items, len(scores) - len(left_out)))
        rows = best.indices.cpu().numpy()
        ids = rows if known is None else known.table[rows, 0]
        return list(zip(ids.tolist(), best.values.tolist(), strict=True))

    def rows(self, table: str, ids: Iterable[int] | Tensor) -> Tensor:
        """Return the rows of an embedding table that ids have, (ids,) int64: what the model takes.

        An id without a row of its own has one that it shares with others.

        Args:
            table: name of the table: that of its column of ids.
            ids: ids as in the data.

        Raises:
            WanmaError: the model has no such table, or an id is outside it.
        """
        import torch

        tables = getattr(getattr(self.model, "config", None), "tables", {})
        if table not in tables:
            name = type(self.model).__name__
            raise WanmaError(f"{name} has no embedding table '{table}'", f"its tables: {', '.join(tables)}")
        numbers = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        known = self.admitted_ids.get(table)
        end = tables[table] if known is None else MAX_RAW_ID
        if unknown := [number for number in numbers if not 0 <= number < end]:
            cause = f"{table}: id {unknown[0]} is outside its embedding table, whose ids are below {end}"
            raise WanmaError(cause, "give an id of the run's data")
        rows = np.array(numbers, dtype=np.int64)
        return torch.from_numpy(rows if known is None else known.rows_of(rows))

    def stream(
        self,
        prompt: str,
        tokens: int = 200,
        *,
        temperature: float = SamplingRule.temperature,
        top_k: int = SamplingRule.top_k,
        top_p: float = SamplingRule.top_p,
        seed: int = SamplingRule.seed,
    ) -> Iterator[str]:
        """Yield pieces of `sample`'s text as they are generated.

        Raises:
            WanmaError: as in `sample`.
        """
        return self._stream(prompt, tokens, SamplingRule(temperature, top_k, top_p, seed))

    def _stream(self, prompt: str, tokens: int, rule: SamplingRule) -> Iterator[str]:
        if self.tokenizer is None:
            raise WanmaError(
                f"{self.checkpoint.parent.parent} trained {type(self.model).__name__} without text and "
                "has no tokenizer",
                "give a run that trained on text",
            )
        length = self.config.data.sequence_length
        return generate_continuation(self.model, self.tokenizer, length, prompt, tokens, rule)


def load(
    run: str | Path | RunDirectory,
    *,
    step: int | None = None,
    model: nn.Module | None = None,
    averaged: bool = True,
    device: str | torch.device = "cpu",
    on_message: Callable[[str], None] = warnings.warn,
) -> Loaded:
    """Load a run's trained model, for inference, evaluation or a notebook; the run may still be active.

    Args:
        run: run directory.
        step: step of the checkpoint; None: the newest complete one.
        model: module to fill, for a run whose model was a Python object; it is put into evaluation mode.
        averaged: load the averaged weights if the run keeps them (`train.weight_average`).
        device: device of the loaded model.
        on_message: receives the reason if damage makes the result older than the newest checkpoint.

    Raises:
        WanmaError: there is no run, it has no such checkpoint or a damaged one, or its model cannot be
            built from the job alone.
    """
    run = run if isinstance(run, RunDirectory) else RunDirectory(Path(run))
    if not run.job.is_file():
        raise WanmaError(f"there is no run in {run.path}", "list the runs with `wanma runs`", EXIT_USAGE)
    job = load_recorded_job(run.job)
    path = find_valid(run.checkpoints, step, on_message)
    saved, state = CheckpointReader(path), read_training_state(path)
    tokenizer = _tokenizer(run, job)
    admitted = {
        name.removeprefix(TABLE_IDS): AdmittedIds(saved.read(name).numpy())
        for name in saved.tensors
        if name.startswith(TABLE_IDS)
    }
    loaded_model = model if model is not None else _build_model(job, run, saved, state, tokenizer, admitted)
    weights = _CheckpointWeights(saved, averaged, job)
    weights.fill(loaded_model, run)
    loaded_model.eval()
    step, loaded_model = int(state["step"]), loaded_model.to(device)
    return Loaded(loaded_model, tokenizer, job, step, path, weights.averaged, admitted)


def _tokenizer(run: RunDirectory, job: Job) -> Tokenizer | None:
    """Return the tokenizer that the run stores; None for a user's own dataset, which holds tokens."""
    folder = run.path / "tokenizer"
    if folder.is_dir():
        return load_tokenizer(folder)
    return load_tokenizer(job.data.tokenizer) if job.data.has_text else None


def _build_model(
    job: Job,
    run: RunDirectory,
    reader: CheckpointReader,
    state: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    admitted: Mapping[str, AdmittedIds],
) -> nn.Module:
    """Build the job's model, without any parallelism."""
    from wanma.models.model_spec import build_model, build_uninitialized_model, resolve_model_spec

    section = job.model.model_copy(update={"lora_rank": 0})  # adapters are merged into the weights
    kind = input_kind(section)
    if kind == "custom":
        return _custom_model(job, run, state)
    shapes = {name: entry.shape for name, entry in reader.tensors.items()}
    image_shape, classes = _image_sizes(section, shapes) if kind == "images" else (None, None)
    spec: ModelSpec = resolve_model_spec(
        section,
        vocabulary_size=tokenizer.vocabulary_size if tokenizer is not None else None,
        sequence_length=job.data.sequence_length,
        image_shape=image_shape,
        classes=classes,
        interaction_sizes=_interaction_sizes(job, shapes, admitted) if kind == "interactions" else None,
    )
    return (
        build_model(spec, job.train.seed) if spec.has_own_initialization else build_uninitialized_model(spec)
    )


def _custom_model(job: Job, run: RunDirectory, state: Mapping[str, Any]) -> nn.Module:
    """Build the model of `model.factory`, whose arguments must be known.

    A class of an object that was passed to `wanma.train` is only accepted if it takes no arguments: with
    others it may be another model with weights of the same shapes.

    Raises:
        WanmaError: the model cannot be built so.
    """
    from wanma.job.file.import_path import import_object
    from wanma.models.model_spec import build_user_model

    factory = job.model.factory
    assert factory is not None
    weights = state.get("identity", {}).get("weights", "")
    was_object = bool(weights) and ":" not in weights  # a factory's have their seed before them
    way_out = f"give the module; its weights are replaced: wanma.load('{run.path}', model=MyModel(...))"
    if was_object:
        try:
            maker = import_object(factory, "model.factory")
        except JobError as error:
            raise WanmaError(f"the run's model was a Python object: {error.message}", way_out) from error
        takes = _parameter_names(maker)
        if takes or takes is None:
            raise WanmaError(
                f"the run's model was a Python object of {factory}, and the arguments that created it are "
                "not recorded",
                way_out,
            )
    model = build_user_model(job.model, job.train.seed)
    if was_object:
        _require_same_code(model, run, state, way_out)
    return model


def _parameter_names(factory: Any) -> list[str] | None:
    """Return the names of a callable's parameters; None if they cannot be read."""
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return None


def _require_same_code(model: nn.Module, run: RunDirectory, state: Mapping[str, Any], hint: str) -> None:
    from wanma.training.checkpointing.code_fingerprint import same_code
    from wanma.training.checkpointing.run_identity import identity_of

    before = state["identity"].get("model", "")
    if before and not same_code(before, identity_of(model, seeded=False).model):
        raise WanmaError(f"the code of {type(model).__name__} has changed since {run.path} was trained", hint)


def _image_sizes(
    section: ModelSection, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, int, int], int]:
    """Return ((channels, height, width), classes) of wanma's vision models, derived from their weights.

    Sizes on which the weights do not depend get a default: the data may no longer exist.
    """
    first = shapes.get("model.first.weight") or shapes["model.conv1.weight"]
    # A stem with a 7 × 7 kernel is for large images.
    height, width = (224, 224) if first[-1] == 7 else (32, 32)
    if "model.hidden.weight" in shapes:  # a convnet's layer has 32 × (height // 4) × (width // 4) inputs
        height, width = 4, 4 * (shapes["model.hidden.weight"][1] // 32)
    if section.image_size is not None:
        height = width = section.image_size
    return (section.channels or first[1], height, width), section.classes or shapes[
        "model.classifier.weight"
    ][0]


def _interaction_sizes(
    job: Job, shapes: Mapping[str, tuple[int, ...]], admitted: Mapping[str, AdmittedIds]
) -> InteractionSizes:
    """Return the sizes of the data of a recommender, derived from its weights: the data may be gone."""
    keys, columns, prefix = job.data.interactions, job.data.columns, "model.embeddings.tables.of_"
    user, item = columns.table_name("user"), columns.table_name("item")
    rows = {
        name.removeprefix(prefix).removesuffix(".weight"): shape[0]
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    # In the order of the data: the network above the vectors depends on it.
    tables = {name: rows[name] for name in (user, item, *columns.sparse) if name in rows}
    dense = shapes.get("model.bottom.0.weight", (0, 0))[1]
    sizes = InteractionSizes(user, item, tables, dense=dense, target=keys.target, negatives=keys.negatives)
    return replace(sizes, shared_rows={name: ids.shared for name, ids in admitted.items()})


class _CheckpointWeights:
    """Weights of a checkpoint by the model's own names, averaged ones preferred, adapters merged."""

    def __init__(self, reader: CheckpointReader, averaged: bool, job: Job) -> None:
        self._reader, self._start_from = reader, job.checkpoint.start_from
        self._alpha = job.model.lora_alpha if job.model.lora_rank > 0 else None
        self.averaged = averaged and any(name.startswith("average.") for name in reader.tensors)
        self._names = {
            name.removeprefix("model."): name for name in reader.tensors if name.startswith("model.")
        }
        if self.averaged:
            self._names |= {
                name.removeprefix("average."): name for name in reader.tensors if name.startswith("average.")
            }

    def fill(self, model: nn.Module, run: RunDirectory) -> None:
        """Copy the weights into `model`, in place; of tied parameters only the first name was saved.

        Raises:
            WanmaError: `model` is another model.
        """
        import torch

        from wanma.api.checkpoints.unrounded_weights import open_start_weights
        from wanma.models.layers.lora import is_lora_parameter

        persistent = model.state_dict(keep_vars=True)
        targets: dict[str, Tensor] = dict(model.named_parameters())
        targets |= {name: tensor for name, tensor in model.named_buffers() if name in persistent}
        added = {
            n for n in self._names if self._alpha is not None and is_lora_parameter(n) and n not in targets
        }
        differences = [f"{name}: not in the checkpoint" for name in targets if name not in self._names]
        differences += [
            f"{name}: only in the checkpoint" for name in self._names if name not in {*targets, *added}
        ]
        for name, tensor in targets.items():
            saved = self._reader.tensors.get(self._names.get(name, ""))
            if saved is not None and isinstance(tensor, torch.nn.Parameter) and saved.shape != tensor.shape:
                differences.append(
                    f"{name}: shape {tuple(tensor.shape)} here, {saved.shape} in the checkpoint"
                )
        if differences:
            raise WanmaError(
                f"{self._reader.name} is not a checkpoint of this model; first differences:\n    "
                + first_lines(differences, _MAX_NAMED),
                f"restore the {run.job} of the run, or give its module (model=)",
            )
        # A user's own module has no mapping to the names of published weights.
        start = self._start_from if hasattr(model, "tensor_mappings") else None
        with torch.no_grad(), open_start_weights(model, start) as unrounded:
            for name, tensor in targets.items():
                value = self._read(name, added, tensor.dtype, unrounded)
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    tensor.copy_(value)
                else:  # another precision than torch's default, or a buffer that a forward replaced
                    tensor.data = value

    def _read(
        self, name: str, pending_adapters: set[str], dtype: torch.dtype, unrounded: UnroundedWeights
    ) -> Tensor:
        """Read one tensor; a weight with the adapter of its layer, if that is to be merged.

        Args:
            dtype: dtype in the module: frozen weights that were saved in 16 bits get at least its bits.
            unrounded: source of those weights before rounding, if known.
        """
        import torch

        weight = self._reader.read(self._names[name])
        if weight.is_floating_point() and torch.promote_types(weight.dtype, dtype) != weight.dtype:
            full_box = Box((0,) * weight.ndim, tuple(weight.shape))
            weight = unrounded.read_unrounded(name, weight, full_box, tuple(weight.shape))
            weight = weight.to(torch.promote_types(weight.dtype, dtype))
        layer, dot, kind = name.rpartition(".")
        halves = {part: f"{layer}{dot}{part}" for part in ("lora_a", "lora_b")}
        if self._alpha is None or kind != "weight" or not pending_adapters.issuperset(halves.values()):
            return weight
        from wanma.models.layers.lora import merge_lora

        adapter = {part: self._reader.read(self._names[lora_name]) for part, lora_name in halves.items()}
        return merge_lora({"weight": weight, **adapter}, self._alpha)["weight"]
