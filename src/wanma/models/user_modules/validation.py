"""Rejection of models that cannot be trained.

Those are a class, lazy layers, compiled modules, complex weights, or no module at all.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from wanma.job.errors import JobError
from wanma.torch_internals.loaded import is_compiled_wrapper


def validate_module(model: object) -> None:
    """Reject a model that cannot be trained.

    Raises:
        JobError: no module, or one without parameters, or whose parameters do not exist yet, are complex, or
            belong to TorchScript.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise JobError(
            f"the model is the class {model.__name__}, but an instance is needed",
            f"pass {model.__name__}(...), or name the class in model.factory with its model.arguments",
        )
    if not isinstance(model, nn.Module):
        raise JobError(
            f"the model is a {type(model).__name__}, not an nn.Module",
            "pass a module, or name a function that returns one in model.factory",
        )
    if is_compiled_wrapper(model):
        raise JobError(
            "the model is the result of torch.compile, which gives its parameters other names",
            "pass the module itself, and set parallel.compile = true to compile its blocks",
        )
    name = type(model).__name__
    if next(model.parameters(), None) is None:
        raise JobError(f"{name} has no parameters to train", "pass a model with parameters")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise JobError(
                f"{name}: {path or 'the model'} is compiled by TorchScript, which holds its own parameters",
                "pass the uncompiled module, and set parallel.compile = true to compile its blocks with "
                "torch.compile",
            )
        own_tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for parameter, tensor in own_tensors:
            full_name = f"{path}.{parameter}" if path else parameter
            if is_lazy(tensor):
                raise JobError(
                    f"{name}: {full_name} has no shape before the first forward ({type(module).__name__})",
                    "run the model once on a sample before you pass it to wanma, or give its sizes",
                )
            if tensor.is_complex() and isinstance(tensor, nn.Parameter):
                raise JobError(
                    f"{name}: {full_name} is complex, but wanma supports only real parameters",
                    "store it as nn.Parameter(torch.view_as_real(weight)), and compute with "
                    "torch.view_as_complex(self.weight)",
                )
