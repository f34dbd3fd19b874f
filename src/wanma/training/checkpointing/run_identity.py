"""Identity of a run, kept in its checkpoints: settings, and fingerprints of what settings do not tell.

A resumed run has the same; `job/file/run_settings.py` has the rule of each key. Weights are compared because
a run that has ended returns its own, whatever model it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wanma.data.datasets.fingerprint import describe_tensor, hash_texts
from wanma.data.sampling.order import order_difference
from wanma.job.errors import WanmaError
from wanma.job.file.run_settings import SettingDifference, merge_settings, setting_differences
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.models.model_spec import ModelSpec, transformers_settings
from wanma.models.user_modules.validation import validate_module
from wanma.training.checkpointing.code_fingerprint import code_fingerprint, module_texts, same_code
from wanma.training.optimizer.user_optimizer import UserOptimization

DEFAULT_CODE = "default"
"""Fingerprint of a loss, optimizer or schedule that is not the user's own."""
_SEED_BOUND = 1 << 32
"""Bound of chosen seeds; a seed that torch draws for itself has 53 bits."""
WAYS_OUT = (
    "give the new run another name (observe.name, --run-dir DIR, in Python run_directory=), or replace the "
    "run with checkpoint.resume = false (--fresh), which keeps the earlier checkpoints; "
    "checkpoint.start_from loads the weights of the earlier run"
)
_STEPS = "train.steps"
_SIZES_OF_DATA = frozenset({"model.tables", "model.bag_sizes", "model.initial_score"})
"""Settings of a recommender that follow from its data, and differ with them from day to day."""
ACCEPT_CHANGES = "changed"
"""Value of `checkpoint.resume` for a run that continues with another identity."""
_ACCEPT_CHANGES_HINT = (
    "; if the change is intended, such as a bug fix, resume with checkpoint.resume = 'changed'"
)


@dataclass(frozen=True)
class Identity:
    """Settings and fingerprints of a run; an empty one is not known and not compared."""

    data: str = ""
    model: str = ""
    """Hash of the model's classes, settings, parameters' names and shapes."""
    weights: str = ""
    """Hash of the initial weights of an object that the user's program has made.

    It is "SEED:HASH" for the product of `model.factory` under the job's seed.
    """
    loss: str = ""
    optimizer: str = ""
    schedule: str = ""
    order: str = ""
    """Order of the data, as of `SampleOrder.identity`."""
    seeded: bool = False
    """True if the weights are drawn under a seed: the program makes the same ones when it runs again."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the job and of its model, as of `run_settings`."""

    @classmethod
    def from_state_values(cls, values: Mapping[str, Any]) -> Identity:
        """Return the identity that a checkpoint keeps."""
        return cls(**{**values.get("identity", {}), "data": values.get("data_fingerprint", "")})

    def state_values(self) -> dict[str, Any]:
        """Return the fingerprints as a checkpoint keeps them."""
        return {"data_fingerprint": self.data, "identity": asdict(replace(self, data=""))}


UNKNOWN_IDENTITY = Identity()
"""Identity of a run of which nothing is compared."""


def identity_of(model: nn.Module, *, seeded: bool) -> Identity:
    """Return the model's part of a run's identity, from the module that the user's program has made.

    Raises:
        JobError: the module is not ready to be trained (`validate_module`).
    """
    validate_module(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors]
    config = sorted(
        (key, str(value)) for key, value in transformers_settings(getattr(model, "config", None)).items()
    )
    structure = hash_texts(*module_texts(model, set()), *shapes, str(config))
    versioned = f"{code_fingerprint(None).split(':')[0]}:{structure}"
    return Identity(model=versioned, weights=weights_fingerprint(model), seeded=seeded)


def with_identity_recorded(spec: ModelSpec, seed: int) -> tuple[ModelSpec, Callable[[], Identity]]:
    """Return `spec` of a factory's model, and a function that returns the identity of the product.

    Args:
        spec: constructor of the model and what it declares.
        seed: seed under which the model is made.
    """
    identity = UNKNOWN_IDENTITY

    def make() -> nn.Module:
        nonlocal identity
        model = spec.build_module()
        identity = identity_of(model, seeded=True)
        identity = replace(identity, weights=f"{seed}:{identity.weights}")
        return model

    return replace(spec, build_module=make), lambda: identity


def with_optimization(identity: Identity, user_optimization: UserOptimization) -> Identity:
    """Return `identity` with the code of the user's optimizer and schedule."""
    optimizer, schedule = user_optimization.optimizer, user_optimization.schedule_function
    return replace(
        identity,
        optimizer=DEFAULT_CODE if optimizer is None else code_fingerprint(optimizer.factory),
        schedule=DEFAULT_CODE if schedule is None else code_fingerprint(schedule),
    )


def weights_fingerprint(model: nn.Module) -> str:
    """Return a hash of a few elements of each parameter and of each buffer that is saved."""
    saved = model.state_dict(keep_vars=True)
    return hash_texts(*(f"{n} {describe_tensor(t)}" for n, t in saved.items() if isinstance(t, torch.Tensor)))


def is_seeded() -> bool:
    """Return whether this process has seeded torch with a chosen number."""
    return torch.initial_seed() < _SEED_BOUND


def record_returned_weights(run: RunDirectory, model: nn.Module) -> None:
    """Keep the fingerprint of the weights that a run has put into the user's module: it may come back."""
    write_json(_returned_path(run.path), {"weights": weights_fingerprint(model)})


def check_settings(
    current: Identity,
    values: Mapping[str, Any],
    checkpoint_name: str,
    steps: int,
    *,
    is_over: bool,
    accepts_changes: bool = False,
) -> list[str]:
    """Compare the settings of the run with those of a checkpoint, before any tensor is loaded.

    Args:
        current: identity of the run now.
        values: state values of the checkpoint.
        checkpoint_name: name of the checkpoint.
        steps: `train.steps` of the job.
        is_over: true if the run has no step left.
        accepts_changes: true if the run continues with another identity, unless it is over.

    Returns:
        messages for the user.

    Raises:
        WanmaError: the run has other settings, or more steps than the job asks for.
    """
    if values["step"] > steps:
        raise WanmaError(
            f"{checkpoint_name} has {values['step']} steps, but train.steps = {steps}: a run only goes on",
            f"set train.steps to {values['step']} or more; or {WAYS_OUT}",
        )
    saved = Identity.from_state_values(values)
    differences = [one for one in setting_differences(saved.settings, current.settings) if one.key != _STEPS]
    refused = [one for one in differences if is_over or one.rule == "identity"]
    if refused and (is_over or not accepts_changes):
        end = ", and its run is complete: no step is left to train with them" if is_over else ""
        more_steps = (
            "raise train.steps to train further steps with these settings; "
            if all(one.rule == "remaining" for one in refused)
            else ""
        )
        raise WanmaError(
            f"{checkpoint_name} was saved with other settings{end}: {_listed(refused)}",
            f"{more_steps}restore the settings of that run; or {WAYS_OUT}"
            + ("" if is_over else _ACCEPT_CHANGES_HINT),
        )
    if not refused:
        return []
    return [f"{checkpoint_name} was saved with other settings; resuming anyway: {_listed(refused)}"]


def start_warnings(folder: str, current: Identity, values: Mapping[str, Any]) -> list[str]:
    """Return a warning for each difference between the model of a run and the one whose weights it takes.

    Args:
        folder: `checkpoint.start_from`.
        current: identity of the run.
        values: state values of the checkpoint in that folder.
    """
    saved = Identity.from_state_values(values)
    found = setting_differences(saved.settings, current.settings, is_model_only=True)
    differences = [str(difference) for difference in found if difference.key not in _SIZES_OF_DATA]
    if saved.model and current.model and not same_code(saved.model, current.model):
        differences.append("the code or the attributes of the module are others")
    return [f"weights of another model, checkpoint.start_from = '{folder}': {text}" for text in differences]


def check_identity(
    current: Identity,
    values: Mapping[str, Any],
    checkpoint_name: str,
    run_directory: Path,
    *,
    is_over: bool,
    is_restart: bool,
    accepts_changes: bool = False,
) -> tuple[Identity, list[str]]:
    """Compare the run's identity with that of a checkpoint.

    Args:
        current: identity of the run now.
        values: state values of the checkpoint.
        checkpoint_name: name of the checkpoint.
        run_directory: run directory.
        is_over: true if the run has no step left.
        is_restart: true if the same program has been started again after a failure.
        accepts_changes: true if the run continues with another model of the same tensors, other data,
            another order or another loss, unless it is over.

    Returns:
        the identity that the run's next checkpoints keep, and messages for the user.

    Raises:
        WanmaError: the run is of another model, of other data, in another order or with another loss.
    """
    saved = Identity.from_state_values(values)
    settings = merge_settings(saved.settings, current.settings)
    changed = dict(_changed(current, saved, values.get("samples", 0), is_over=is_over))
    if changed and (is_over or not accepts_changes):
        part, difference = next(iter(changed.items()))
        carry_on = "" if is_over else _ACCEPT_CHANGES_HINT
        way_out = f"restore the {part} of that run; or {WAYS_OUT}{carry_on}"
        raise WanmaError(f"{checkpoint_name} was saved while training {difference}", way_out)
    notes = [
        f"{checkpoint_name} was saved while training {difference}; resuming anyway"
        for difference in changed.values()
    ]
    if accepts_changes and not is_over:
        known = {field: value for field, value in asdict(current).items() if value}
        return Identity(**{**asdict(saved), **known, "seeded": current.seeded, "settings": settings}), notes
    merged = Identity(
        current.data or saved.data,
        current.model or saved.model,
        saved.weights or current.weights,
        current.loss or saved.loss,
        current.optimizer or saved.optimizer,
        current.schedule or saved.schedule,
        current.order or saved.order,
        current.seeded if current.weights else saved.seeded,
        settings,
    )
    if not saved.weights or not current.weights or saved.weights == current.weights or is_restart:
        return merged, []
    if current.weights == _read_returned_weights(run_directory):
        return merged, []
    if not is_over and _seed(saved.weights) != _seed(current.weights):
        return merged, []
    if is_over or (saved.seeded and current.seeded):
        is_from_factory = bool(_seed(current.weights))
        hint = (
            "model.factory, train.seed"
            if is_from_factory
            else "call torch.manual_seed before the model is built"
        )
        raise WanmaError(
            f"{checkpoint_name} is of a model with other initial weights than this one"
            + (", and its run is finished" if is_over else ""),
            f"restore the initial weights of that run ({hint}); or {WAYS_OUT}",
        )
    return merged, [
        "the initial weights of the model differ from those of the run's first start (random weights "
        f"without a seed); the run resumes from {checkpoint_name}"
    ]


def _changed(
    current: Identity, saved: Identity, samples_consumed: int, *, is_over: bool
) -> Iterator[tuple[str, str]]:
    """Yield (part that differs, words for what the saved run was trained on or with).

    A schedule may change for the steps that remain, as `train.schedule` may.
    """
    if saved.data and current.data and saved.data != current.data:
        yield "data", "on other data than the job has now"
    if saved.model and current.model and not same_code(saved.model, current.model):
        yield "model", "another model than this one"
    if saved.loss and current.loss and not same_code(saved.loss, current.loss):
        yield "loss", "with another loss than this one"
    for part in ("optimizer", "schedule") if is_over else ("optimizer",):
        before, now = getattr(saved, part), getattr(current, part)
        if before and now and not same_code(before, now):
            yield part, f"with another {part} than this one"
    if difference := order_difference(saved.order, current.order, samples_consumed):
        yield "data order", f"in another order of the data: {difference}"


def _listed(differences: Iterable[SettingDifference]) -> str:
    return "; ".join(map(str, differences))


def _seed(weights: str) -> str:
    """Return the seed of a factory's weights; empty for those of an object."""
    return weights.rpartition(":")[0]


def _read_returned_weights(directory: Path) -> str | None:
    path = _returned_path(directory)
    try:
        weights = json.loads(path.read_text())["weights"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return weights if isinstance(weights, str) else None


def _returned_path(directory: Path) -> Path:
    return directory / "returned.json"
