"""Fingerprints of a run's model, data, order and loss, kept in checkpoints; a resumed run has the same.

Weights are compared because a run that has ended returns its own, whatever model it is given.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wanma.data.datasets.fingerprint import describe_tensor, hash_texts
from wanma.data.sampling.order import order_difference
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json
from wanma.models.model_spec import ModelSpec
from wanma.models.user_modules.validation import validate_module
from wanma.training.checkpointing.code_fingerprint import code_fingerprint, module_texts, same_code

DEFAULT_LOSS = "default"
_SEED_BOUND = 1 << 32
"""Bound of chosen seeds; a seed that torch draws for itself has 53 bits."""
_WAYS_OUT = (
    "give the new run another name (observe.name, or run_directory= in Python), or replace the run with "
    "checkpoint.resume = false (--fresh), which keeps the earlier checkpoints; checkpoint.start_from "
    "loads the weights of the earlier run"
)
ACCEPT_CHANGES = "changed"
"""Value of `checkpoint.resume` for a run that continues with a changed model, data, order or loss."""
_ACCEPT_CHANGES_HINT = (
    "; if the change is intended, such as a bug fix, resume with checkpoint.resume = 'changed'"
)


@dataclass(frozen=True)
class Identity:
    """Fingerprints of a run's data, its order, model and loss; an empty one is not known and not compared."""

    data: str = ""
    model: str = ""
    """Hash of the model's classes, settings, parameters' names and shapes."""
    weights: str = ""
    """Hash of the initial weights of an object that the user's program has made.

    It is "SEED:HASH" for the product of `model.factory` under the job's seed.
    """
    loss: str = ""
    order: str = ""
    """Order of the data, as of `SampleOrder.identity`."""
    seeded: bool = False
    """True if the weights are drawn under a seed: the program makes the same ones when it runs again."""

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
    structure = hash_texts(*module_texts(model, set()), *shapes, _config(model))
    # The code in it is compiled by a version of Python. "/2": attributes are part of it.
    versioned = f"{code_fingerprint(None).split(':')[0]}/2:{structure}"
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


def _config(model: nn.Module) -> str:
    """Return the config of a transformers model as text, without keys about where and how it was loaded."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_dict", None)):
        return ""
    loading = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "problem_type"}
    return str(sorted((key, str(value)) for key, value in config.to_dict().items() if key not in loading))


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
    saved = Identity(**{**values.get("identity", {}), "data": values["data_fingerprint"]})
    changed = dict(_changed(current, saved, values.get("samples", 0)))
    if changed and (is_over or not accepts_changes):
        part, difference = next(iter(changed.items()))
        carry_on = "" if is_over else _ACCEPT_CHANGES_HINT
        way_out = f"restore the {part} of that run; or {_WAYS_OUT}{carry_on}"
        raise WanmaError(f"{checkpoint_name} was saved while training {difference}", way_out)
    notes = [
        f"{checkpoint_name} was saved while training {difference}; resuming anyway"
        for difference in changed.values()
    ]
    if accepts_changes and not is_over:
        known = {field: value for field, value in asdict(current).items() if value}
        return Identity(**{**asdict(saved), **known, "seeded": current.seeded}), notes
    merged = Identity(
        current.data or saved.data,
        current.model or saved.model,
        saved.weights or current.weights,
        current.loss or saved.loss,
        current.order or saved.order,
        current.seeded if current.weights else saved.seeded,
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
            f"restore the initial weights of that run ({hint}); or {_WAYS_OUT}",
        )
    return merged, [
        "the initial weights of the model differ from those of the run's first start (random weights "
        f"without a seed); the run resumes from {checkpoint_name}"
    ]


def _changed(current: Identity, saved: Identity, samples_consumed: int) -> Iterator[tuple[str, str]]:
    """Yield (part that differs, words for what the saved run was trained on or with)."""
    if saved.data and current.data and saved.data != current.data:
        yield "data", "on other data than the job has now"
    if saved.model and current.model and not same_code(saved.model, current.model):
        yield "model", "another model than this one"
    if saved.loss and current.loss and not same_code(saved.loss, current.loss):
        yield "loss", "with another loss than this one"
    if difference := order_difference(saved.order, current.order, samples_consumed):
        yield "data order", f"in another order of the data: {difference}"


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
