"""Model specification: the construction of a module from a `[model]` section."""

from __future__ import annotations

import inspect
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from wanma.job.errors import JobError, WanmaError
from wanma.job.file.import_path import import_object
from wanma.job.sections.model import ModelSection
from wanma.job.sections.recommender import InteractionSizes
from wanma.job.sections.train import ParameterGroupSection
from wanma.job.user_frames import user_frame_text
from wanma.models.architectures.decoder import Decoder, decoder_parallel_spec
from wanma.models.architectures.image_classifiers import VISION_PARALLEL_SPEC, build_image_classifier
from wanma.models.config.huggingface_config import read_section_config
from wanma.models.config.resolution import (
    InputKind,
    input_kind,
    reject_architecture_keys,
    reject_other_models_keys,
    resolve_decoder_config,
    resolve_vision_config,
)
from wanma.models.layers.batch_norm import convert_batch_norm
from wanma.models.layers.lora import apply_lora, is_lora_parameter
from wanma.models.recommender.base import RECOMMENDER_PARALLEL_SPEC
from wanma.models.recommender.build import build_recommender
from wanma.models.recommender.config import resolve_recommender_config
from wanma.models.structure.parallel_spec import ParallelSpec, tie_parameters
from wanma.models.structure.parameter_initialization import draw_initial_value
from wanma.models.structure.parameter_roles import is_frozen
from wanma.models.user_modules.validation import validate_module

_LOADING_KEYS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "problem_type"}
"""Keys of a transformers config about where and how a model was loaded."""


@dataclass(frozen=True)
class ModelSpec:
    """Specification of a model: its construction and its parallel spec."""

    name: str
    input_kind: InputKind
    build_module: Callable[[], nn.Module]
    """Builder of the module.

    Ours also work inside `torch.device("meta")`, and then need `draw_initial_value` for each parameter.
    """
    parallel_spec: ParallelSpec | None
    """Parallel spec; None for users' modules, which declare none."""
    has_own_initialization: bool
    """True if the constructor initializes the weights: users' modules, built on CPU under the job's seed."""
    is_frozen: Callable[[str], bool] = lambda _: False
    """Predicate of a parameter's name: True if the job freezes it, whatever the model says."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that decide what the model computes, by name; of a user's module those that are known."""

    def require_parallel_spec(self, job_key: str) -> ParallelSpec:
        """Return the parallel spec, which job key `job_key` requires.

        Raises:
            JobError: the model declares none.
        """
        if self.parallel_spec is None:
            raise JobError(
                f"{job_key}: {self.name} has no parallel spec, which this kind of parallelism requires",
                f"set {job_key} = 1, and use data parallelism (dp_replicate, dp_shard), which supports any "
                "module",
            )
        return self.parallel_spec


def resolve_model_spec(
    section: ModelSection,
    *,
    vocabulary_size: int | None,
    sequence_length: int | None,
    image_shape: tuple[int, int, int] | None,
    classes: int | None,
    interaction_sizes: InteractionSizes | None = None,
) -> ModelSpec:
    """Return the specification of a `[model]` section, with the data's sizes where the section is silent.

    Args:
        section: the job's `[model]`.
        vocabulary_size: number of tokens of the tokenizer; None without one.
        sequence_length: of the data; only some Hugging Face models have a maximum.
        image_shape: (channels, height, width); None without images.
        classes: number of classes of labelled data; None without labels.
        interaction_sizes: sizes of an interaction log; None without one.

    Raises:
        JobError: keys that are unknown, missing, or contradict each other or the data; a factory that
            cannot be imported.
    """
    if section.lora_rank > 0:
        section_without_lora = section.model_copy(update={"lora_rank": 0})
        spec = resolve_model_spec(
            section_without_lora,
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            image_shape=image_shape,
            classes=classes,
            interaction_sizes=interaction_sizes,
        )
        return apply_lora_to_spec(spec, section)
    kind = input_kind(section)
    reject_other_models_keys(section)
    name = section.preset or section.family or section.factory or section.huggingface or ""
    if kind == "custom":
        settings = {"batch_norm_group": section.batch_norm_group}
        return ModelSpec(name, kind, _user_factory(section), None, True, settings=settings)
    if kind == "tokens" and image_shape is not None:
        raise JobError(
            f"model '{name}' needs tokens, but the data are images", "set model.preset to a vision preset"
        )
    if section.huggingface is not None:
        return _transformers_spec(section, vocabulary_size, sequence_length)
    if section.arguments:
        raise JobError(
            "model.arguments applies only to model.factory and model.huggingface", "remove model.arguments"
        )
    if kind == "interactions":
        if image_shape is not None or vocabulary_size is not None:
            raise JobError(
                f"model '{name}' needs interactions of users and items",
                "name them in data.path, with data.kind = 'interactions'",
            )
        return _recommender_spec(section, name, interaction_sizes)
    if interaction_sizes is not None:
        raise JobError(
            f"model '{name}' does not read interactions", "set model.family = 'recommender' and model.kind"
        )
    if kind == "tokens":
        decoder = resolve_decoder_config(section, vocabulary_size)
        parallel_spec = decoder_parallel_spec(decoder)
        return ModelSpec(name, kind, lambda: Decoder(decoder), parallel_spec, False, settings=asdict(decoder))
    if image_shape is None and vocabulary_size is not None:
        raise JobError(
            f"model '{name}' needs images, but the data are tokens", "set model.preset to a decoder preset"
        )
    vision = resolve_vision_config(section, image_shape, classes)
    return ModelSpec(
        name,
        kind,
        lambda: build_image_classifier(vision),
        VISION_PARALLEL_SPEC,
        False,
        settings=asdict(vision),
    )


def _recommender_spec(section: ModelSection, name: str, sizes: InteractionSizes | None) -> ModelSpec:
    config = resolve_recommender_config(section, sizes)
    settings = asdict(config)
    build = partial(build_recommender, config)
    return ModelSpec(name, "interactions", build, RECOMMENDER_PARALLEL_SPEC, False, settings=settings)


def apply_freezing_to_spec(spec: ModelSpec, groups: Sequence[ParameterGroupSection]) -> ModelSpec:
    """Return `spec` of a model with the parameters frozen that `train.parameter_groups` freezes."""
    return replace(spec, is_frozen=lambda name: spec.is_frozen(name) or is_frozen(name, groups))


def wrap_module(model: nn.Module, batch_norm_group: int | None = None) -> ModelSpec:
    """Return the specification of a module that the user built; `build_module` returns that very module.

    Args:
        model: the module.
        batch_norm_group: converts its batch normalization to groups of that many samples, in place.
            Without it, `find_sample_coupling_modules` names what a plan of more than one micro-batch must
            refuse.

    Raises:
        JobError: as of `validate_module`.
    """
    validate_module(model)
    if batch_norm_group is not None:
        model = convert_batch_norm(model, batch_norm_group)
    config: Any = getattr(model, "config", None)
    settings = transformers_settings(config)
    if hasattr(config, "use_cache"):
        # Of transformers: a cache of keys and values grows again where backward runs a block again.
        config.use_cache = False
    if batch_norm_group is not None:
        settings["batch_norm_group"] = batch_norm_group
    return ModelSpec(type(model).__name__, "custom", lambda: model, None, True, settings=settings)


def transformers_settings(config: Any) -> dict[str, Any]:
    """Return the settings in a config of transformers, without those about where and how it was loaded.

    Returns:
        settings as `ModelSpec.settings`; none for any other object.
    """
    if not callable(getattr(config, "to_dict", None)):
        return {}
    return {f"config.{key}": value for key, value in config.to_dict().items() if key not in _LOADING_KEYS}


def build_model(spec: ModelSpec, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the full model on CPU with its initial values, from which every layout of a job starts.

    Raises:
        JobError: the user's factory failed, or returned no module.
    """
    if spec.has_own_initialization:
        with seeded_generators(seed), torch.device("cpu"):
            return spec.build_module().to(dtype)
    model = build_uninitialized_model(spec, dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw_initial_value(model, name, parameter.shape, parameter.dtype, seed))
    return model


def build_user_model(section: ModelSection, seed: int) -> nn.Module:
    """Build the model of `model.factory` unchanged, on CPU.

    Raises:
        JobError: it cannot be imported, failed, or returned no module.
    """
    with seeded_generators(seed), torch.device("cpu"):
        return _user_factory(section).build_unconverted()


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python for constructors on the CPU, and restore them."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


def build_uninitialized_model(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build one of our models in full on CPU, with uninitialized parameters for a checkpoint's."""
    with torch.device("meta"):
        model = spec.build_module().to(dtype)
    model.to_empty(device="cpu")
    if spec.parallel_spec is not None:
        tie_parameters(model, spec.parallel_spec.tied_parameters)
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if callable(reset):
            reset()
    return model


def _transformers_spec(
    section: ModelSection, vocabulary_size: int | None, sequence_length: int | None
) -> ModelSpec:
    values = read_section_config(section)  # also checks that transformers is installed
    from wanma.models.huggingface.causal_model import build_causal_model, build_transformers_config
    from wanma.models.huggingface.validation import max_position_embeddings

    config = build_transformers_config(values, vocabulary_size, sequence_length)
    length = sequence_length or max_position_embeddings(config) or 2048
    with torch.device("meta"):
        model = build_causal_model(config, length)
    build = partial(build_causal_model, config, length, model.probe_result)
    settings = transformers_settings(config)
    return ModelSpec(type(model).__name__, "tokens", build, model.parallel_spec, False, settings=settings)


def _user_factory(section: ModelSection) -> _UserFactory:
    assert section.factory is not None
    reject_architecture_keys(section)
    function = import_object(section.factory, "model.factory")
    if not callable(function):
        raise JobError(
            f"model.factory = '{section.factory}' is a {type(function).__name__}, not a function or class",
            "give a function or class that returns an nn.Module",
        )
    try:
        inspect.signature(function).bind(**section.arguments)
    except TypeError as error:
        raise JobError(
            f"model.factory = '{section.factory}' cannot be called with model.arguments: {error}",
            f"correct model.arguments; the signature is {inspect.signature(function)}",
        ) from error
    return _UserFactory(section.factory, function, section.arguments, section.batch_norm_group)


@dataclass(frozen=True)
class _UserFactory:
    """Builder of the user's module, with batch normalization converted: torch's would follow the layout."""

    path: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    batch_norm_group: int

    def __call__(self) -> nn.Module:
        return convert_batch_norm(self.build_unconverted(), self.batch_norm_group)

    def build_unconverted(self) -> nn.Module:
        """Build the module as the user's function returns it."""
        try:
            module = self.function(**self.arguments)
        except WanmaError:
            raise
        except Exception as error:  # whatever the user's code raises
            problem = f"model.factory = '{self.path}' failed: {type(error).__name__}: {error}"
            line = user_frame_text(error)
            raise JobError(
                f"{problem}\n    {line}" if line else problem,
                f"correct the function or model.arguments; for the full traceback run: {self._command()}",
            ) from error
        if not isinstance(module, nn.Module):
            raise JobError(
                f"model.factory = '{self.path}' returned {type(module).__name__}, not an nn.Module",
                "return the module itself",
            )
        validate_module(module)
        return module

    def _command(self) -> str:
        """Return the same call as a shell command."""
        module, _, name = self.path.partition(":")
        arguments = f"**{self.arguments!r}" if self.arguments else ""
        code = f"import {module}; {module}.{name}({arguments})"
        return f"python -c {shlex.quote(code)}"


def apply_lora_to_spec(spec: ModelSpec, section: ModelSection) -> ModelSpec:
    """Return `spec` of a model with the adapters of `section`, if any."""
    if section.lora_rank == 0:
        return spec
    return replace(
        spec,
        build_module=lambda: apply_lora(spec.build_module(), section),
        is_frozen=lambda name: not is_lora_parameter(name),
        settings={
            **spec.settings,
            "lora_rank": section.lora_rank,
            "lora_alpha": section.lora_alpha,
            "lora_targets": section.lora_targets,
        },
    )
