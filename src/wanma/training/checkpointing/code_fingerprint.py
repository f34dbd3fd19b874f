"""Fingerprint of a user's code: functions and modules by their computation, not by their source location.

Lines, comments and docstrings do not count; constants, closures and the functions called from the same
program do. Of libraries the name alone counts, so that an upgrade is no change of the user's.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wanma.data.datasets.fingerprint import describe_tensor, hash_texts

_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"}
)
_PACKAGES = ("site-packages", "dist-packages")
_VERSION = 3
"""Version of the texts that are hashed: fingerprints of other versions are not compared."""
_MAX_ITEMS = 100
"""Largest number of items of a container that count."""
_LITERALS = (bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has, such as its parameters and hooks."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def code_fingerprint(thing: object) -> str:
    """Return a hash of a function, callable object or module, the same in other processes of one Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"{version}/{_VERSION}:{hash_texts(*_texts(thing, set()))}"


def same_code(one: str, other: str) -> bool:
    """Return whether two fingerprints are equal, or cannot be compared.

    Pythons compile to different code, and versions of wanma may hash different texts.
    """
    versions = {text.partition(":")[0] for text in (one, other) if ":" in text}
    return one == other or len(versions) == 2


def module_texts(module: nn.Module, seen: set[int]) -> Iterator[str]:
    """Yield the classes of a module and its children, the code of the user's own ones, and their settings."""
    for name, part in module.named_modules():
        kind = parametrize.type_before_parametrizations(part)
        yield f"{name}: {kind.__qualname__}"
        if not is_library_class(kind):
            yield from _class_texts(kind, seen)
            yield from _settings(part, seen)
        elif not kind.__module__.startswith("wanma."):
            yield _ADDRESS.sub("", part.extra_repr())
            yield from _constructor_settings(part, seen)


def _texts(value: Any, visited: set[int]) -> Iterator[str]:
    if value is None or isinstance(value, _LITERALS):
        yield repr(value)
        return
    if isinstance(value, Tensor):
        yield describe_tensor(value)
        return
    if isinstance(value, list | tuple):  # perhaps made here: its number may be another's later
        for part in value[:_MAX_ITEMS]:
            yield from _texts(part, visited)
        return
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Enum):
        yield f"{type(value).__qualname__} {value.name}"
    elif isinstance(value, functools.partial):
        yield from _texts([value.func, list(value.args), value.keywords], visited)
    elif isinstance(value, MethodType):
        yield from _texts([value.__func__, value.__self__], visited)
    elif isinstance(value, FunctionType):
        yield from _function_texts(value, visited)
    elif isinstance(value, type):
        yield value.__qualname__
        if not is_library_class(value):
            yield from _class_texts(value, visited)
    elif isinstance(value, nn.Module):
        yield from module_texts(value, visited)
        for name, item in value.state_dict().items():
            yield f"{name} {describe_tensor(item) if isinstance(item, Tensor) else type(item).__name__}"
        yield from _settings(value, visited)
    elif isinstance(value, Mapping):
        for key in list(value)[:_MAX_ITEMS]:
            yield str(key)
            yield from _texts(value[key], visited)
    else:
        yield getattr(value, "__qualname__", type(value).__qualname__)
        if not isinstance(value, type(sys)) and not is_library_class(type(value)):
            yield from _class_texts(type(value), visited)
            yield from _settings(value, visited)


def _function_texts(function: FunctionType, visited: set[int]) -> Iterator[str]:
    yield function.__qualname__
    code = function.__code__
    if is_library_file(code.co_filename) or function.__module__.startswith("wanma."):
        return
    yield from code_texts(code, function.__doc__)
    yield from _texts(list(function.__defaults__ or ()), visited)
    yield from _texts(function.__kwdefaults__, visited)
    for cell in function.__closure__ or ():
        try:
            yield from _texts(cell.cell_contents, visited)
        except ValueError:  # not yet filled
            yield "empty"
    for name in sorted(code_names(code)):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType | functools.partial | bool | int | float | str):
            yield name
            yield from _texts(value, visited)


def _class_texts(kind: type, visited: set[int]) -> Iterator[str]:
    """Yield the methods and plain attributes of a class and of those of its bases that are the user's."""
    for base in kind.__mro__:
        if is_library_class(base) or id(base) in visited:
            continue
        visited.add(id(base))
        for name, value in sorted(vars(base).items()):
            plain: Any = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            plain = plain.fget if isinstance(plain, property) else plain
            is_plain = isinstance(plain, bool | int | float | str) and not name.startswith("__")
            if isinstance(plain, FunctionType) or is_plain:
                yield name
                yield from _texts(plain, visited)


def code_texts(code: CodeType, docstring: str | None) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_names, code.co_freevars))  # locals go by number
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_texts(constant, None)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))  # a set's own order differs between processes
        elif docstring is None or constant != docstring:
            yield repr(constant)


def code_names(code: CodeType) -> set[str]:
    """Return the global names and attributes that a function and those inside it use."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(code_names, inner))


def _settings(instance: Any, visited: set[int]) -> Iterator[str]:
    """Yield the attributes of an object that set what it computes; of a user's module also private ones."""
    is_module = isinstance(instance, nn.Module)
    for name, value in sorted(getattr(instance, "__dict__", {}).items()):
        is_internal = name in _MODULE_ATTRIBUTES if is_module else name.startswith("_") or name == "training"
        if not is_internal and _is_setting(value):
            yield name
            yield from _texts(value, visited)


def _is_setting(value: Any) -> bool:
    """Return whether an attribute is no state: tensors and modules have names and shapes of their own."""
    if isinstance(value, Mapping):
        return all(map(_is_setting, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_setting, value))
    return not isinstance(value, Tensor | nn.Module | MethodType | set | frozenset)


def _constructor_settings(module: nn.Module, visited: set[int]) -> Iterator[str]:
    """Yield the attributes of a library's module that its constructor was given, such as `num_heads`."""
    for name in inspect.signature(type(module)).parameters:
        value = vars(module).get(name)
        if isinstance(value, bool | int | float | str | FunctionType | BuiltinFunctionType):
            yield name
            yield from _texts(value, visited)


def is_library_class(kind: type) -> bool:
    if kind.__module__ in ("builtins", "typing", "abc") or kind.__module__.startswith("wanma."):
        return True
    file: str | None = None
    for value in vars(kind).values():
        function: Callable[..., Any] | None = getattr(value, "__func__", value)
        if isinstance(function, FunctionType) and function.__module__ == kind.__module__:
            file = function.__code__.co_filename
            break
    if file is None:  # no method of its own: by its module
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is not None and is_library_file(file)


def is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(name in file for name in _PACKAGES)
