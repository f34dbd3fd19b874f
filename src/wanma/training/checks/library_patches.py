"""Patches of libraries: functions that stand in the place of a library's own, and hooks on all modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from wanma.torch_internals.modules import GLOBAL_HOOKS
from wanma.training.checkpointing.code_fingerprint import is_library_file
from wanma.training.checks.value_texts import unwrapped, value_text

SCRIPTS = ("__main__", "__mp_main__")
"""Names of a script's own module, which is sent to the ranks as it is."""


ADDITION = "+"
"""End of the name of what one library has put into another: it may be an addition for its own use."""


def library_patches(reached: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of functions and methods of libraries that come from somewhere else."""
    for place, module in _with_imports(reached).items():
        for name, value in list(vars(module).items()):
            found = {name: value}
            if issubclass(type(value), type) and value.__module__ == place and name == value.__qualname__:
                found = {f"{name}.{attribute}": item for attribute, item in list(vars(value).items())}
            for path, item in found.items():
                if _is_foreign(path, item, place) and (text := value_text(item)) is not None:
                    yield f"{place}:{path}{ADDITION if _is_of_library(item) else ''}", text


def _with_imports(names: set[str]) -> dict[str, ModuleType]:
    """Return modules of libraries, and the modules that these have imported as such (`F`, `init`)."""
    found: dict[str, ModuleType] = {}
    pending = sorted(names)
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        if module is None or name in found or is_standard(name) or not is_library(name):
            continue
        found[name] = module
        if name != package(name):  # a package has all its modules as attributes
            pending += [one.__name__ for one in vars(module).values() if type(one) is ModuleType]
    return found


def _is_foreign(path: str, value: Any, place: str) -> bool:
    """Return whether a function stands under another name than its own, or is another library's.

    A function that a module has imported under its own name is none of these, nor is what a library makes at
    run time for itself, such as torch's `Module.__init__` once something was compiled.
    """
    name, is_method = last_part(path), "." in path
    function = unwrapped(value)
    kind = type(function)
    if kind is BuiltinFunctionType:
        return bool(name != function.__name__)
    if kind is not FunctionType:
        kind = function if issubclass(kind, type) else kind
        return kind is functools.partial or kind.__module__ in SCRIPTS or not is_library(kind.__module__)
    home = function.__globals__.get("__name__", "")
    if package(home) == package(place):
        is_made_at_run_time = "<locals>" in function.__qualname__
        return name not in (function.__name__, function.__code__.co_name) and not is_made_at_run_time
    is_import = getattr(sys.modules.get(function.__module__), name, None) is value
    return (
        is_method
        or not is_import
        or not (is_standard(home) or is_library_file(function.__code__.co_filename))
    )


def _is_of_library(value: Any) -> bool:
    function = unwrapped(value)
    return type(function) is FunctionType and is_library(function.__globals__.get("__name__", ""))


def global_hooks() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the hooks on all modules."""
    for name in GLOBAL_HOOKS:
        if hooks := vars(nn.modules.module)[name]:
            yield f"{nn.modules.module.__name__}:{name}", hooks_text(hooks)


def hooks_text(hooks: Mapping[int, Any]) -> str:
    return str([value_text(hook) or type(hook).__qualname__ for hook in hooks.values()])


def is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return package(module) == "wanma" or file is None or is_library_file(file)


def is_standard(module: str) -> bool:
    return package(module) in sys.stdlib_module_names


def package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def last_part(name: str) -> str:
    return name.rpartition(":")[2].rpartition(".")[2]
