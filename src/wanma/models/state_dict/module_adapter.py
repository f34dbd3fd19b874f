"""State-dict adapter of a user's module: its published checkpoint is its state dict, under its own names."""

from __future__ import annotations

from typing import Any

from torch import nn

from wanma.models.layers.lora import is_lora_parameter
from wanma.models.state_dict.tensor_mapping import Shape, StateDictAdapter, TensorMapping, TensorSlice


class ModuleStateDictAdapter:
    """State-dict adapter (`StateDictAdapter`) of a module that declares none.

    Args:
        model: the whole module, or a rank's part of it.
    """

    tied_tensors: tuple[tuple[str, str], ...] = ()

    def __init__(self, model: nn.Module) -> None:
        # Files hold a shared parameter under one of its names, or under several.
        self._names_by_identity: dict[int, list[str]] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            self._names_by_identity.setdefault(id(parameter), []).append(name)
        self._names = {name: self._names_by_identity[id(parameter)] for name, parameter in parameters.items()}
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def tensor_mappings(self, name: str, shape: Shape) -> tuple[TensorMapping, ...]:
        """Return the parameter under any of its own names."""
        if is_lora_parameter(name):
            return ()
        start = (0,) * len(shape)
        return tuple((TensorSlice(own_name, 0, shape, start),) for own_name in self._names.get(name, [name]))

    def is_ignored_tensor(self, tensor: str) -> bool:
        """Return True for further names of a shared parameter, and for buffers, which are filled by name."""
        return tensor in self._names or tensor in self._buffers

    def config_mismatches(self, config: dict[str, Any]) -> list[str]:  # noqa: ARG002  # of no known model
        """Return no differences: a user's module has no settings to compare."""
        return []


def get_state_dict_adapter(model: nn.Module) -> StateDictAdapter:
    """Return a model's state-dict adapter: the model itself, else one by its own names."""
    if hasattr(model, "tensor_mappings"):
        return model  # type: ignore[return-value]  # looked for
    return ModuleStateDictAdapter(model)  # type: ignore[return-value]  # writes no config
