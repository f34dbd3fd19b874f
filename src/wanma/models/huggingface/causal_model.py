"""Causal models of `transformers` with wanma's decoder signature: tokens, documents and positions to logits.

    config = build_transformers_config(read_section_config(section), vocabulary, sequence_length)
    with torch.device("meta"):
        model = build_causal_model(config)

A model is built from its config alone, on the meta device; nothing is downloaded and no code from
elsewhere is run. It remains transformers' own, parameter names included, except for the modules that
`module_replacement` replaces: those no plan could split, or that compute in fp32 whatever the precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wanma.job.errors import JobError, WanmaError
from wanma.models.huggingface.derived_parallel_spec import derive_parallel_spec, find_block_list
from wanma.models.huggingface.forward_probe import ProbeResult
from wanma.models.huggingface.installed_transformers import (
    VERSION,
    allow_autocast_on_meta,
    require_family,
    scales_residual_projections,
)
from wanma.models.huggingface.module_replacement import (
    ATTENTION_IMPLEMENTATION,
    MASK_KEYWORD,
    replace_modules,
)
from wanma.models.huggingface.pipeline_stage import (
    StageBoundary,
    keep_blocks,
    pass_through,
    placeholder_embedding,
)
from wanma.models.huggingface.probe_validation import require_same_training
from wanma.models.huggingface.state_dict_adapter import TransformersStateDictAdapter
from wanma.models.huggingface.validation import validate_config, validate_model
from wanma.models.layers.attention import AttentionMask
from wanma.models.layers.experts import Experts
from wanma.models.layers.router import RouterGate
from wanma.models.structure.parallel_spec import ParallelSpec, tie_parameters
from wanma.torch_internals.modules import (
    registered_buffers,
    registered_children,
    registered_parameters,
    set_registered_buffers,
    set_registered_children,
    set_registered_parameters,
)


def build_transformers_config(
    settings_from_file: dict[str, Any], vocabulary_size: int | None, sequence_length: int | None
) -> PreTrainedConfig:
    """Build the transformers config with the settings of `read_section_config`.

    Args:
        settings_from_file: those settings.
        vocabulary_size: number of tokens of the tokenizer.
        sequence_length: of the data.

    Raises:
        JobError: transformers does not know the family, or it has settings that would be ignored.
    """
    if settings_from_file["model_type"] not in CONFIG_MAPPING:
        raise JobError(
            f"model.huggingface: model_type {settings_from_file['model_type']!r} is not supported by the "
            f"installed transformers {VERSION}",
            "update transformers if the model is newer: pip install --upgrade transformers",
        )
    try:
        # A type may be an alias: without it, the config has the name of its family.
        settings = {key: value for key, value in settings_from_file.items() if key != "model_type"}
        config: PreTrainedConfig = CONFIG_MAPPING[settings_from_file["model_type"]].from_dict(settings)
    except Exception as error:  # whatever a config's own validation raises
        raise JobError(
            f"model.huggingface: transformers rejects the config: {error}",
            "correct the file, or override the key in model.arguments",
        ) from error
    require_family(config.model_type)
    validate_config(config, vocabulary_size, sequence_length)
    return config


def build_causal_model(
    config: PreTrainedConfig, sequence_length: int, probe_result: ProbeResult | None = None
) -> CausalTransformersModel:
    """Build the model on the current device, ready to be split.

    Args:
        config: the transformers config.
        sequence_length: of the data.
        probe_result: of the same model, built before; None: the model is probed, on the meta device.

    Raises:
        JobError: it is no causal model, or not built as wanma needs it.
    """
    model = _build_adapted_model(config)
    if probe_result is None:
        probe_result = require_same_training(model, sequence_length, _build_adapted_model)
    kind = type(model)
    # A new class, as FSDP2 makes one: parameters keep their names, without a wrapper's prefix.
    model.__class__ = type(kind.__name__, (CausalTransformersModel, kind), {})
    assert isinstance(model, CausalTransformersModel)
    causal_model: CausalTransformersModel = model
    causal_model.mask = AttentionMask()
    causal_model.probe_result = probe_result
    causal_model.parallel_spec = derive_parallel_spec(model, probe_result)
    tie_parameters(causal_model, causal_model.parallel_spec.tied_parameters)
    return causal_model


class CausalTransformersModel(TransformersStateDictAdapter):
    """Mixin placed before a transformers class among the bases of a model's class."""

    parallel_spec: ParallelSpec
    probe_result: ProbeResult
    config: Any
    mask: nn.Module
    stage_boundary: StageBoundary | None = None
    """Tensors at the block edges of a pipeline stage; None without a pipeline."""

    def forward(
        self, tokens: Tensor, documents: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of the next token at every position; arguments as of `Decoder`."""
        self._check_weight_tying()
        boundary = self.stage_boundary
        if self.probe_result.reads_tokens:
            inputs = {"input_ids": tokens}
        elif boundary is None or boundary.is_first:
            inputs = {"inputs_embeds": cast(PreTrainedModel, self).get_input_embeddings()(tokens)}
        else:
            # Modules before the blocks run too, on unused values.
            boundary.stage_input, inputs = tokens, {"inputs_embeds": torch.empty_like(tokens)}
        if positions is not None and positions.ndim == 1:
            positions = positions.unsqueeze(0)
        if positions is not None and self.probe_result.first_position:
            positions = positions + self.probe_result.first_position
        output = super().forward(
            **inputs, position_ids=positions, use_cache=False, **{MASK_KEYWORD: self.mask(documents)}
        )
        if boundary is not None and not boundary.is_last:
            return boundary.pop_output()
        logits: Tensor = output.logits
        return logits

    def keep_stage(self, held: range, *, is_first: bool, is_last: bool) -> None:
        """Keep one pipeline stage's part in place: the blocks in `held`, and the modules at the model's ends.

        Modules before all blocks stay in the first stage, those after them in the last.

        Raises:
            JobError: the model cannot be cut between blocks.
        """
        if self.probe_result.split_obstacle is not None:
            raise JobError(
                f"parallel.pp: {type(self).__name__} cannot be split into pipeline stages: "
                f"{self.probe_result.split_obstacle}",
                "set parallel.pp = 1",
            )
        assert self.parallel_spec.blocks is not None
        self.stage_boundary = StageBoundary(
            self.probe_result.block_output_count, is_first=is_first, is_last=is_last
        )
        keep_blocks(self.get_submodule(self.parallel_spec.blocks), held, self.stage_boundary)
        absent_modules = (() if is_first else self.parallel_spec.first_stage_modules) + (
            () if is_last else self.parallel_spec.last_stage_modules
        )
        for path in absent_modules:
            parent_path, _, child = path.rpartition(".")
            parent_module, part = self.get_submodule(parent_path), self.get_submodule(path)
            delattr(parent_module, child)
            is_embedding = isinstance(part, nn.Embedding)
            width = part.get_parameter("weight").shape[-1] if is_embedding else 0
            setattr(
                parent_module,
                child,
                placeholder_embedding(self.stage_boundary, width) if is_embedding else pass_through,
            )

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a tile of parameter `name` in place, as transformers initializes it.

        The padding token is an exception: wanma's data never contain it, and it is initialized like others.
        """
        path, _, kind = name.rpartition(".")
        owner = self.get_submodule(path)
        deviation = getattr(self.config, "initializer_range", None) or 0.02
        if self.config.model_type == "gpt2" and name.endswith("c_proj.weight"):
            # Only for this family transformers treats the layers that add to the residual stream differently
            # (Radford et al. 2019, section 2.3), and looks for it in modules that are ours here.
            if scales_residual_projections(cast(PreTrainedModel, self), self.config):
                deviation /= math.sqrt(2 * self.config.n_layer)
            tensor.normal_(0.0, deviation, generator=generator)
        elif isinstance(owner, (Experts, RouterGate)):
            tensor.normal_(0.0, deviation, generator=generator)
        else:
            _initialize_by_transformers(cast(PreTrainedModel, self), owner, name, kind, tensor, generator)

    def reset_buffers(self) -> None:
        """Restore the values of the buffers, which a model built on the meta device has lost."""
        for path, module in self.named_modules():
            if not any(True for _ in module.buffers(recurse=False)):
                continue
            if not any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
                continue  # ours have a reset of their own
            for name, value in _compute_buffers(cast(PreTrainedModel, self), module, path).items():
                module.get_buffer(name).copy_(value)

    def _check_weight_tying(self) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for source, target in self.parallel_spec.tied_parameters:
            if source in parameters and target in parameters and parameters[source] is not parameters[target]:
                raise RuntimeError(f"{source} and {target} are tied, but are no longer one parameter")


def _build_adapted_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Build transformers' model with wanma's modules."""
    allow_autocast_on_meta()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=ATTENTION_IMPLEMENTATION, dtype=torch.float32
        )
    except Exception as error:  # whatever a family's constructor raises
        raise _build_error(config, error) from error
    validate_model(model)
    replace_modules(model)
    # A tied tensor has the name that comes first: that of the embedding, which the first stage holds.
    base = str(find_block_list(model)).partition(".")[0]
    children = registered_children(model)
    set_registered_children(model, {base: children[base], **children})
    return model


def _build_error(config: PreTrainedConfig, error: Exception) -> JobError:
    """Build the error for a config that transformers cannot build with wanma's attention."""
    kind, line = config.model_type, str(error).strip().partition("\n")[0][:200]
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return JobError(
            f"model.huggingface: {kind} is not a causal language model of transformers",
            "use the config of a causal language model",
        )
    if isinstance(error, KeyError) and error.args == (ATTENTION_IMPLEMENTATION,):
        return JobError(
            f"model.huggingface: {kind} is not supported: it does not use the attention interface of "
            "transformers",
            "pass the model as model.factory: it supports data parallelism (dp_replicate, dp_shard)",
        )
    return JobError(
        f"model.huggingface: transformers cannot build {kind} from the config: {type(error).__name__}: "
        f"{line}",
        "correct the file, or override the key in model.arguments, or pass the model as model.factory",
    )


def _initialize_by_transformers(
    model: PreTrainedModel, owner: nn.Module, name: str, kind: str, tensor: Tensor, generator: torch.Generator
) -> None:
    """Fill `tensor`, in place of a parameter of `owner`, by transformers' own rule."""
    clone = _copy_without_parameters(owner)
    registered_parameters(clone)[kind] = tensor.fill_(math.nan)  # type: ignore[assignment]  # a stand-in
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(generator.initial_seed())
        _innermost_model(model, name.rpartition(".")[0])._init_weights(clone)
    if bool(tensor.isnan().any()):
        raise WanmaError(
            f"transformers does not initialize parameter {name} of {type(model).__name__}",
            "start from pretrained weights: set checkpoint.start_from",
        )


def _compute_buffers(model: PreTrainedModel, module: nn.Module, path: str) -> Mapping[str, Tensor]:
    """Compute the buffers of one module by transformers' rule; check that it ignores earlier values."""
    computed_buffers: list[dict[str, Tensor]] = []
    for fill_value in (0, 1):
        clone = _copy_without_parameters(module)
        buffers: dict[str, Tensor | None] = {
            name: torch.full(buffer.shape, fill_value, dtype=buffer.dtype)
            for name, buffer in registered_buffers(module).items()
            if buffer is not None
        }
        set_registered_buffers(clone, buffers)
        _innermost_model(model, path)._init_weights(clone)
        computed_buffers.append(cast(dict[str, Tensor], registered_buffers(clone)))
    for name, value in computed_buffers[0].items():
        if not torch.equal(value, computed_buffers[1][name]):
            raise WanmaError(
                f"transformers does not initialize buffer {path}.{name} of {type(model).__name__}",
                "pass the model as model.factory: it is then built on the CPU with its own initial values",
            )
    return computed_buffers[0]


def _innermost_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost model around the module at `path`, whose rule transformers applies to it."""
    parts = path.split(".") if path else []
    enclosing_modules = (model.get_submodule(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    return next((part for part in enclosing_modules if isinstance(part, PreTrainedModel)), model)


def _copy_without_parameters(module: nn.Module) -> nn.Module:
    """Copy a module, class and attributes, with empty parameters.

    The parameters may be sharded over ranks, which would all have to take part. `copy` would have FSDP2 call
    its constructor.
    """
    clone = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    stand_ins = {
        name: torch.empty(0) if value is not None else None
        for name, value in registered_parameters(module).items()
    }
    set_registered_parameters(clone, stand_ins)
    if isinstance(clone, nn.Embedding):
        clone.padding_idx = None  # a tile does not know whether it holds that row
    return clone
