"""State of the user's process that Python objects refer to by name, compared between it and the ranks.

Objects of the script itself travel to the ranks as they are. What a module defines travels by its name: a
rank imports the module from its file. A class or function that was patched, a changed constant, a hook on all
modules, or a file that was edited after its import would then train as the file says.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import itertools
import sys
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from wanma.job.errors import JobError
from wanma.job.file.import_path import import_object
from wanma.job.sections.job import Job
from wanma.torch_internals.modules import GLOBAL_HOOKS
from wanma.training.checkpointing.code_fingerprint import code_names, is_library_class, is_library_file
from wanma.training.checks.library_patches import (
    ADDITION,
    SCRIPTS,
    global_hooks,
    hooks_text,
    is_library,
    is_standard,
    last_part,
    library_patches,
    package,
)
from wanma.training.checks.value_texts import (
    MAX_DEPTH,
    MAX_ITEMS,
    PLAIN,
    is_filled,
    unwrapped,
    value_text,
)

ProcessState = dict[str, int]
"""Checksums by name: "module:attribute" of what a module defines, "module:Class.attribute" of a class's."""

_MAX_OBJECTS = 100_000
"""Largest number of objects that are followed; a dataset may hold any number."""
_SHOWN_NAMES = 6
_ITEM_INSTRUCTIONS = 6
"""Instructions between the loading of a container and the assignment of its item."""
_MISSING = object()
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


def process_state(objects: Iterable[object], factories: Iterable[str] = ()) -> ProcessState:
    """Return the state of this process by which the code of objects and of factories computes.

    Args:
        objects: objects that are sent to the ranks.
        factories: import paths of functions and classes that the ranks call. Only a module that is loaded
            here can have been changed.
    """
    recorder = _Recorder()
    for value in objects:
        recorder.follow(value)
    recorder.follows_construction = True
    for path in factories:
        module, _, attributes = path.partition(":")
        with contextlib.suppress(AttributeError):
            recorder.follow(functools.reduce(getattr, attributes.split("."), sys.modules.get(module)))
    return recorder.state()


def factory_paths(job: Job, objects: Collection[str]) -> dict[str, str]:
    """Return the import paths of the user's code that a job names, by key.

    Args:
        job: the job.
        objects: kinds of the objects passed in Python. With a model, `model.factory` only records its class.
    """
    paths = {
        "model.factory": None if "model" in objects else job.model.factory,
        "model.loss": job.model.loss,
        "data.factory": job.data.factory,
        "train.optimizer_factory": job.train.optimizer_factory,
        "train.schedule_factory": job.train.schedule_factory,
        **{f"data.sources[{n}].factory": source.factory for n, source in enumerate(job.data.sources)},
        **{f"train.metrics.{name}": path for name, path in job.train.metrics.items()},
    }
    return {key: path for key, path in paths.items() if path is not None}


def refuse_other_process_state(state: ProcessState, factories: Mapping[str, str]) -> None:
    """Compare the state of the user's process with that of this one, which has not yet used any object.

    Args:
        state: state of the user's process.
        factories: as of `factory_paths`.

    Raises:
        JobError: names what differs.
    """
    if not state:
        return
    for key, path in factories.items():
        import_object(path, key)
    names = [name.replace(":", ".").removesuffix(ADDITION) for name in state if _is_other(name, state[name])]
    if not names:
        return
    shown = ", ".join(names[:_SHOWN_NAMES]) + (", ..." if len(names) > _SHOWN_NAMES else "")
    raise JobError(
        f"your program and its ranks differ in {shown}: a rank imports modules from their files, which lack "
        "a change at run time, or have one since your program imported them",
        "make the change while the module of the model is imported, or define the class or function in the "
        "script, which is sent as it is; train.check_code = false trains as the files say",
    )


def _is_other(name: str, checksum: int) -> bool:
    """Return whether a recorded thing is another one in this process."""
    module = name.partition(":")[0]
    with contextlib.suppress(Exception):  # whatever the module raises; a function may import it only later
        importlib.import_module(module)
    if module not in sys.modules:  # nothing here can refer to it
        return False
    value = _named(name.removesuffix(ADDITION))
    if value is _MISSING:
        return not name.endswith(ADDITION)
    text = hooks_text(value) if last_part(name) in GLOBAL_HOOKS else value_text(value)
    return text is None or zlib.crc32(text.encode()) != checksum


def plain_state(value: object) -> int:
    """Return a checksum of the numbers and texts that an object and its code refer to, without tensors.

    A method counts with those attributes of its object that it uses.
    """
    recorder = _Recorder(follows_whole_owners=False)
    recorder.follow(value)
    checksum = 0
    for item in recorder.visited:
        plain = [(name, value_text(part)) for name, part in _parts(item) if isinstance(part, PLAIN)]
        checksum = zlib.crc32(repr(plain).encode(), checksum)
    return checksum


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what an object itself holds, by name or number."""
    if isinstance(value, dict):
        yield from itertools.islice(value.items(), MAX_ITEMS)
    elif isinstance(value, list | tuple):
        yield from enumerate(value[:MAX_ITEMS])
    elif isinstance(value, FunctionType):
        names = code_names(value.__code__)
        yield from ((name, value.__globals__[name]) for name in sorted(names & value.__globals__.keys()))
        yield from enumerate(cell.cell_contents for cell in value.__closure__ or () if is_filled(cell))
    elif isinstance(value, MethodType):
        yield from ((name, vars(value.__self__)[name]) for name in _used_attributes(value))
    elif not isinstance(value, type):
        yield from (item for item in getattr(value, "__dict__", {}).items() if item[0] != "training")


def _used_attributes(method: MethodType) -> list[str]:
    """Return the names of an object's own attributes that one of its methods uses."""
    return sorted(code_names(method.__func__.__code__) & getattr(method.__self__, "__dict__", {}).keys())


class _Recorder:
    """Walk over objects and the code that they reach; it records what travels by name."""

    def __init__(self, *, follows_whole_owners: bool = True) -> None:
        self._follows_whole_owners = follows_whole_owners
        """True if a method leads to all of its object; False: to what it uses of it."""
        self._texts: dict[str, str] = {}
        self._constants: set[str] = set()
        """Names of recorded values that are no code; they count only if some code uses them."""
        self._used_names: set[str] = set()
        self._assigned_globals: set[str] = set()
        """Names that code assigns itself: counters and caches, not constants."""
        self._libraries: set[str] = set()
        """Modules of libraries whose code is reached."""
        self._visited: dict[tuple[int, ...], object] = {}
        self.follows_construction = False
        """True if ranks construct objects; otherwise they arrive finished."""

    @property
    def visited(self) -> list[Any]:
        return list(self._visited.values())

    def state(self) -> ProcessState:
        for name, text in itertools.chain(library_patches(self._libraries), global_hooks()):
            self._texts[name] = text
        return {
            name: zlib.crc32(text.encode())
            for name, text in self._texts.items()
            if name not in self._constants
            or (last_part(name) in self._used_names and name not in self._assigned_globals)
        }

    def follow(self, value: Any) -> None:
        """Follow an object to the code and the values that it refers to."""
        pending = [value]
        while pending and len(self._visited) < _MAX_OBJECTS:
            value = pending.pop()
            is_method = isinstance(value, MethodType)  # a method is a new object each time
            key = (id(value.__func__), id(value.__self__)) if is_method else (id(value),)
            if isinstance(value, (*PLAIN, Tensor, ModuleType)) or key in self._visited:
                continue
            self._visited[key] = value
            pending += self._references(value)

    def _references(self, value: Any) -> Iterator[Any]:
        """Yield what an object refers to; record what of it travels by name."""
        if isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif isinstance(value, MethodType) and self._follows_whole_owners:
            yield from (value.__func__, value.__self__)
        elif isinstance(value, MethodType):
            yield value.__func__
            yield from (vars(value.__self__)[name] for name in _used_attributes(value))
            for name in sorted(code_names(value.__func__.__code__) & {*dir(type(value.__self__))}):
                if isinstance(function := getattr(type(value.__self__), name), FunctionType):
                    yield MethodType(function, value.__self__)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, nn.Module):
            yield type(value)
            yield from nn.Module.children(value)
            yield from vars(value).values()
        elif isinstance(value, dict):
            yield from itertools.islice(value.values(), MAX_ITEMS)
        elif isinstance(value, list | tuple | set | frozenset):
            yield from itertools.islice(value, MAX_ITEMS)
        elif (inner := unwrapped(value)) is not value:
            yield inner
        elif not isinstance(value, BuiltinFunctionType):
            yield type(value)
            if not is_standard(type(value).__module__):
                yield from getattr(value, "__dict__", {}).values()

    def _function(self, function: FunctionType) -> Iterator[Any]:
        yield from vars(function).values()
        yield from (function.__defaults__, function.__kwdefaults__)
        yield from (cell.cell_contents for cell in function.__closure__ or () if is_filled(cell))
        code, module = function.__code__, function.__globals__.get("__name__", "")
        if is_library_file(code.co_filename) or package(module) == "wanma":
            self._libraries.add(module)
            return
        names = code_names(code)
        self._used_names |= names
        self._assigned_globals |= {f"{module}:{name}" for name in _assigned_globals(code)}
        place = f"{function.__module__}:{function.__qualname__}"
        if unwrapped(_named(place)) is function:
            self._record(place, function)
        for name in sorted(names):
            value = function.__globals__.get(name, sys.modules.get(name))
            if isinstance(value, ModuleType):
                yield from self._module_attributes(value, names)
            elif name in function.__globals__ and not name.startswith("__"):
                self._record(f"{module}:{name}", value)
                yield value

    def _module_attributes(self, module: ModuleType, names: set[str], depth: int = 0) -> Iterator[Any]:
        """Yield the attributes of a module that code uses by these names."""
        if of_library := is_library(module.__name__):
            self._libraries.add(module.__name__)
            if is_standard(module.__name__):
                return
        for name in sorted(names & vars(module).keys()):
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                if depth < MAX_DEPTH:
                    yield from self._module_attributes(value, names, depth + 1)
            elif not of_library and not name.startswith("__"):
                self._record(f"{module.__name__}:{name}", value)
                yield value

    def _class(self, kind: type) -> Iterator[Any]:
        for base in kind.__mro__:
            if is_library_class(base):
                self._libraries.add(base.__module__)
                continue
            place = f"{base.__module__}:{base.__qualname__}"
            travels_by_name = _named(place) is base
            if travels_by_name:
                self._record(place, base)
            for name, value in vars(base).items():
                plain = unwrapped(value)
                is_code = isinstance(plain, FunctionType)
                is_skipped = name in _CONSTRUCTORS and not self.follows_construction
                if is_skipped if is_code else name.startswith("__"):
                    continue
                if travels_by_name:
                    self._record(f"{place}.{name}", value)
                yield plain

    def _record(self, name: str, value: Any) -> None:
        """Record a value if ranks find it by its name."""
        module = name.partition(":")[0]
        if module in SCRIPTS or module not in sys.modules or package(module) == "wanma":
            return
        if (text := value_text(value)) is not None:
            self._texts[name] = text
            if not isinstance(unwrapped(value), FunctionType | type | BuiltinFunctionType):
                self._constants.add(name)


def _named(name: str) -> Any:
    """Return the thing of a recorded name in this process, or `_MISSING`."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        try:
            value = vars(value)[part]
        except (TypeError, KeyError):
            return _MISSING
    return value


def _assigned_globals(code: CodeType) -> Iterator[str]:
    """Yield the globals that code assigns, or of which it assigns an item."""
    loaded: deque[str | None] = deque(maxlen=_ITEM_INSTRUCTIONS)
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL":
            yield instruction.argval
        elif instruction.opname == "STORE_SUBSCR":
            yield from filter(None, loaded)
        loaded.append(instruction.argval if instruction.opname == "LOAD_GLOBAL" else None)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_globals(constant)
