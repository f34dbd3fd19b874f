"""Functions that stay outside compiled code, without the import of the compiler.

torch wraps optimizers, hooks and initial values (`torch._disable_dynamo`), and the wrapper imports the
compiler at its first call: two thirds of a second and 80 MB, in a process that may compile nothing. Until the
compiler is imported, there is nothing to stay outside of, and the wrapped function is called as it is.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, _use_grad_for_differentiable

from wanma.torch_internals.loaded import COMPILER_MODULE, is_compiler_loaded

Function = TypeVar("Function", bound=Callable[..., Any])
_SHORTCUT = "__dynamo_disable"
"""Attribute of a wrapped function: what the wrapper calls instead of asking the compiler."""


def uncompiled(function: Function) -> Function:
    """Return the function as one that compiled code calls, and whose own code is not compiled."""
    if is_compiler_loaded():
        disabled: Function = torch.compiler.disable(function)
        return disabled

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    wrapper: Any = _disable_dynamo(call)
    _give_shortcuts([call])
    return wrapper  # type: ignore[no-any-return]


def defer_compiler() -> None:
    """Let the functions that torch has wrapped so far be called without the compiler, until its import."""
    if is_compiler_loaded():
        return
    found = gc.get_referrers(*_codes_of(_disable_dynamo))
    wrappers = [referrer for referrer in found if isinstance(referrer, FunctionType)]
    # Not `__wrapped__`, which some of torch's decorators set to another function.
    closures = [inspect.getclosurevars(wrapper).nonlocals for wrapper in wrappers]
    _give_shortcuts([closure["fn"] for closure in closures if "fn" in closure])


def step_uncompiled(optimizer: Optimizer) -> None:
    """Update the parameters of one of torch's optimizers; its own `step` imports the compiler to leave it."""
    uses_grad: Any = getattr(type(optimizer).step, "__wrapped__", None)
    code = getattr(uses_grad, "__code__", None)
    if is_compiler_loaded() or code not in _codes_of(_use_grad_for_differentiable):
        optimizer.step()
        return

    def step(self: Optimizer) -> None:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            uses_grad.__wrapped__(self)

    Optimizer.profile_hook_step(step)(optimizer)


def _codes_of(function: Any) -> list[CodeType]:
    """Return the code of the functions that a function makes."""
    return [constant for constant in function.__code__.co_consts if isinstance(constant, CodeType)]


def _give_shortcuts(functions: Sequence[Any]) -> None:
    finder = next((entry for entry in sys.meta_path if isinstance(entry, _CompilerImport)), None)
    if finder is None:
        finder = _CompilerImport()
        sys.meta_path.insert(0, finder)
    for function in functions:
        if not hasattr(function, _SHORTCUT):
            setattr(function, _SHORTCUT, function)
            finder.functions.append(function)


class _CompilerImport(MetaPathFinder):
    """Finder that finds nothing; as the compiler is imported, it takes all shortcuts away."""

    def __init__(self) -> None:
        self.functions: list[Any] = []

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == COMPILER_MODULE:
            for function in self.functions:
                delattr(function, _SHORTCUT)
            self.functions.clear()
        return None
