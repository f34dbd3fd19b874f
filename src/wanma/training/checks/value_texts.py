"""Texts of code and values: unlike texts for unlike code, the same in other processes of one Python."""

from __future__ import annotations

import enum
import functools
import itertools
import zlib
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from wanma.data.datasets.fingerprint import describe_tensor
from wanma.training.checkpointing.code_fingerprint import code_texts, is_library_class, is_library_file

MAX_ITEMS = 100
"""Largest number of items of a container that are followed, or compared."""
MAX_DEPTH = 4
"""Largest depth of nested containers, or of modules in modules."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
"""Types of values that are compared by their text."""
_MAX_TEXT = 4096
"""Largest length of a text that is compared as it is; of a longer one, its checksum is."""
_WRAPPERS = (FunctionType, type(functools.lru_cache(len)))


def value_text(value: Any, depth: int = 0) -> str | None:
    """Return a text that differs where code or value does; None: a kind that is not compared."""
    value = unwrapped(value)
    if isinstance(value, str | bytes) and len(value) > _MAX_TEXT:
        content = value if isinstance(value, bytes) else value.encode(errors="replace")
        return f"{len(value)} {zlib.crc32(content)}"
    if isinstance(value, PLAIN):
        return repr(value)
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, FunctionType):
        return _function_text(value, depth)
    if isinstance(value, Tensor):
        return None if depth else describe_tensor(value)
    if isinstance(value, type):
        methods = sorted(name for name, item in vars(value).items() if isinstance(item, FunctionType))
        bases = [base.__qualname__ for base in value.__bases__]
        return f"{value.__module__}.{value.__qualname__} {bases} {[] if is_library_class(value) else methods}"
    if isinstance(value, BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, MethodType):
        return value_text(value.__func__, depth + 1)
    if isinstance(value, functools.partial):
        return _joined([value_text(item, depth + 1) for item in (value.func, value.args, value.keywords)])
    if isinstance(value, dict):
        items = itertools.islice(value.items(), MAX_ITEMS)
        return _joined([str(len(value)), *(value_text(item, depth + 1) for pair in items for item in pair)])
    if isinstance(value, list | tuple | set | frozenset):
        texts = [value_text(item, depth + 1) for item in itertools.islice(value, MAX_ITEMS)]
        is_ordered = isinstance(value, list | tuple)
        return _joined([str(len(value)), *(texts if is_ordered else sorted(map(str, texts)))])
    if is_library_class(type(value)) or not hasattr(value, "__dict__"):
        return None
    settings = [(name, item) for name, item in vars(value).items() if isinstance(item, PLAIN)]
    return f"{type(value).__qualname__} {settings!r}"


def _function_text(function: FunctionType, depth: int) -> str | None:
    code = function.__code__
    if any(name.startswith("@py") for name in (*code.co_names, *code.co_varnames)):
        return None  # rewritten by pytest, in the user's process alone
    values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    values += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
    texts = [value_text(value, depth + 1) or type(value).__qualname__ for value in values]
    return " ".join([*code_texts(code, function.__doc__), *texts])


def _joined(texts: list[str | None]) -> str | None:
    """Return the text of a container; None if it holds what is not compared, as caches mostly do."""
    return None if None in texts else f"[{', '.join(map(str, texts))}]"


def unwrapped(value: Any) -> Any:
    """Return the function in a method's descriptor, and in wrappers of libraries around it."""
    kind = type(value)  # not `isinstance`: objects of libraries act when they are asked for attributes
    if kind in (staticmethod, classmethod):
        value = value.__func__
    elif kind is property:
        value = value.fget
    while type(value) in _WRAPPERS and (inner := vars(value).get("__wrapped__")) is not None:
        if isinstance(value, FunctionType) and not is_library_file(value.__code__.co_filename):
            break
        value = inner
    return value


def is_filled(cell: CellType) -> bool:
    """Return whether a variable of a closure has a value yet."""
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
