"""Private names of torch stand in one room, in a table: each is there, and nothing else of wanma uses one."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from wanma.torch_internals import distributed, fsdp, pipelining, table, versions
from wanma.torch_internals.table import TORCH_INTERNALS, TorchInternal

SOURCE = Path(__file__).parents[1] / "src" / "wanma"
ROOM = SOURCE / "torch_internals"

NAMES_OF_OTHERS = {
    "argparse": "_ActionsContainer _SubParsersAction _actions _choices_actions _option_string_actions "
    "_current_indent _indent_increment",
    "argcomplete": "_ARGCOMPLETE",
    "os, atexit, threading": "_exit _run_exitfuncs _shutdown",
    "named tuples": "_fields _replace",
    "fsspec": "_find",
    "weakref": "_registry",
    "ray": "_soft_target_node_id",
    "datasets: fields of state.json": "_data_files _indices_files _indices_data_files",
    "transformers": "_attn_implementation _global_mapping _init_weights _keys_to_ignore_on_load_unexpected "
    "_supports_attention_backend _tied_weights_keys _tp_plan _MAPPING_NAMES _loss_function _name_or_path",
    "wanma: endings of names": "_bytes _proj _T _seconds _latency_seconds _per_second _bytes_per_second "
    "_bus_bytes_per_second _flops_per_second",
}
"""Private names that are not torch's, by whose they are."""

PROTOCOLS = {
    fsdp.FsdpParameter: ("FSDPParam",),
    fsdp.FsdpParameterGroup: ("FSDPParamGroup",),
    fsdp.FsdpMesh: ("FSDPMeshInfo", "DDPMeshInfo"),
}
"""Protocols of the room, with the classes of torch that they describe."""


def test_only_the_room_uses_private_names_of_torch() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in source_files()
        if not path.is_relative_to(ROOM)
        for line, name in private_names(nodes_of(path))
    ]
    assert not found, "use wanma.torch_internals, with a row in its table:\n" + "\n".join(found)


def test_every_name_of_the_table_is_in_the_installed_torch() -> None:
    version = versions.installed_torch_version()
    rows = [row for row in TORCH_INTERNALS if row.is_in(version)]
    if torch.version.cuda is None:
        rows = [row for row in rows if not row.is_cuda_only]
    assert len(rows) > 100
    assert [(row.name, row.otherwise) for row in rows if not exists(row.name)] == []


def test_every_private_name_that_the_room_uses_has_a_row() -> None:
    found = [
        f"{path.name}:{line}: {name}"
        for path in sorted(ROOM.glob("*.py"))
        if path.name != "table.py"
        for line, name in private_names(nodes_of(path))
        if not has_row(name)
    ]
    assert not found, "\n".join(found)


def test_every_attribute_that_the_room_describes_has_a_row() -> None:
    rows = {tuple(row.name.rpartition(":")[2].split(".")) for row in TORCH_INTERNALS}
    for protocol, classes in PROTOCOLS.items():
        members = {*protocol.__annotations__, *(name for name in vars(protocol) if not name.startswith("_"))}
        assert members
        assert [name for name in members if not any((kind, name) in rows for kind in classes)] == []
    assert {("_ComputationType", action) for action in pipelining.FORWARD_ACTIONS} <= rows


def test_no_row_stands_for_a_name_that_nobody_uses() -> None:
    texts = "\n".join(path.read_text() for path in source_files() if path.name != "table.py")
    words = set(re.findall(r"\w+", texts))
    assert [row.name for row in TORCH_INTERNALS if used_form(row) not in words] == []
    assert len({row.name for row in TORCH_INTERNALS}) == len(TORCH_INTERNALS)


def test_every_row_says_what_happens_without_the_name() -> None:
    for row in TORCH_INTERNALS:
        assert len(row.otherwise) > 10
        assert versions.FIRST_TORCH_VERSION <= row.first <= row.last <= versions.NEWEST_TRIED_TORCH_VERSION


def test_a_name_of_the_newest_tried_torch_is_expected_in_newer_ones() -> None:
    row = TorchInternal("torch:name", "nothing", first=(2, 12))
    assert [row.is_in(version) for version in ((2, 11), (2, 12), (2, 15), (2, 16), (3, 0))] == [
        False,
        *[True] * 4,
    ]
    gone = TorchInternal("torch:name", "nothing", last=(2, 13))
    assert [gone.is_in(version) for version in ((2, 11), (2, 13), (2, 14), (2, 16))] == [
        True,
        True,
        False,
        False,
    ]


def test_no_name_of_others_is_listed_in_vain() -> None:
    listed = {name for names in NAMES_OF_OTHERS.values() for name in names.split()}
    used = {
        name
        for path in source_files()
        for node in nodes_of(path)
        for name in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(name, str)
    }
    assert listed - used == set()
    assert listed.isdisjoint(row.name.rpartition(".")[2] for row in TORCH_INTERNALS)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("from torch._subclasses.fake_tensor import FakeTensor", "torch._subclasses.fake_tensor:FakeTensor"),
        ("from torch.utils.checkpoint import _Mode", "torch.utils.checkpoint:_Mode"),
        ("import torch._dynamo", "torch._dynamo"),
        ("def f():\n    import torch._dynamo as dynamo", "torch._dynamo"),
        ("torch._C._fast()", "_C"),
        ("torch.ops.aten._softmax", "_softmax"),
        ("tensor._version", "_version"),
        ("class A:\n    _version = 1\n\ntensor._version", "_version"),
        ("module._parameters = {}", "_parameters"),
        ("class A:\n    def f(self):\n        return self._backward_hooks", "_backward_hooks"),
        ("getattr(tensor, '_version')", "_version"),
        ("update(attributes, _modules=modules)", "_modules"),
        ("sys.modules['torch._C._distributed_c10d']", "torch._C._distributed_c10d"),
        ("logger = 'logs of torch._inductor'", "torch._inductor"),
        ("names = 'sum _softmax mean'.split()", "_softmax"),
        ("name == 'aten::_fused_dropout'", "_fused_dropout"),
        ("class A(Group):\n    def _allgather_base(self): ...", "_allgather_base"),
        ("class A(Group):\n    _allgather_base = other", "_allgather_base"),
        ("import torch.nn as nn\nclass A(nn.Module):\n    def _apply(self): ...", "_apply"),
        ("getattr(torch, 'swapped')", "torch:swapped"),
        ("import torch.distributed as dist\nhasattr(dist, 'gather_all')", "torch.distributed:gather_all"),
    ],
)
def test_no_use_of_a_private_name_is_overlooked(source: str, name: str) -> None:
    assert name in [found for _, found in private_names(list(ast.walk(ast.parse(source))))]


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring about torch._C and _version."""',
        "class A:\n    def __init__(self):\n        self._own = 1\n\ndef f(a):\n    return a._own",
        "class A:\n    _own: int\n    def __init__(self, other):\n        self.x = other._own",
        "_own(_local)",
        "nt._replace(x=1)",
        "module.__dict__",
        "torch.nn.Module",
        "getattr(torch, name)",
    ],
)
def test_private_names_of_wanma_and_of_others_pass(source: str) -> None:
    assert list(private_names(list(ast.walk(ast.parse(source))))) == []


# ------------------------------------------------------------------ versions


def test_the_installed_torch_is_known_without_importing_it() -> None:
    assert versions.installed_torch_version() == versions.parse_version(torch.__version__)
    assert versions.installed_torch_version() >= versions.FIRST_TORCH_VERSION


@pytest.mark.parametrize(
    ("installed", "note"),
    [
        ("2.13.0+cpu", None),
        ("2.15.3", None),
        ("2.16.0", "2.16.0: newer than any tried here: 2.15"),
        ("2.100.1+cu140", "2.100.1: newer than any tried here: 2.15"),
        ("3.0.0a0+gitabc", "3.0.0a0: newer than any tried here: 2.15"),
    ],
)
def test_a_newer_torch_than_any_tried_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, installed: str, note: str | None
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: installed)
    assert versions.untried_version_note() == versions.untried_version_note(installed) == note


def test_a_broken_combination_names_the_version_and_the_way_out() -> None:
    broken = versions.SPLIT_BACKWARD_OF_REUSED_PARAMETERS
    assert [broken.affects(version) for version in ((2, 11), (2, 12), (2, 13), (2, 16))] == [
        True,
        True,
        False,
        False,
    ]
    assert broken.describe((2, 12)).startswith("torch 2.12 computes wrong gradients")
    assert broken.update_hint == "install torch 2.13 or newer"


def test_a_limit_that_a_newer_torch_has_lifted_names_that_version() -> None:
    broken = versions.COMPILED_TENSOR_PARALLEL_RECOMPUTE
    affected = [broken.affects(version) for version in ((2, 11), (2, 12), (2, 13), (2, 14), (2, 16))]
    assert affected == [False, True, True, False, False]
    assert broken.update_hint == "install torch 2.14 or newer"


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("is_owned", [True, False])
def test_nodes_written_in_python_live_as_long_as_their_owners(is_owned: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    first = _Double.apply(x)
    last = _Double.apply(first) * 3
    node = first.grad_fn
    owners = pipelining.owners_of_python_nodes(last.grad_fn, [node]) if is_owned else []
    assert [owner.name() for owner in owners] == ["MulBackward0"] * is_owned
    del first, last
    edge = torch.autograd.graph.GradientEdge(node, 0)
    if not is_owned and versions.FREED_PYTHON_NODES.affects(versions.installed_torch_version()):
        with pytest.raises(RuntimeError, match="_input_metadata"):
            torch.autograd.grad([edge], [x], [torch.ones(3)])
    else:
        (gradient,) = torch.autograd.grad([edge], [x], [torch.ones(3)])
        assert gradient.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("version", "calls"), [((2, 13), 1), ((2, 14), 0), ((2, 16), 0)])
def test_sequence_numbers_are_set_where_that_has_an_effect(
    monkeypatch: pytest.MonkeyPatch, version: versions.Version, calls: int
) -> None:
    called: list[str] = []

    class Gloo:
        def _set_sequence_number_for_group(self) -> None:
            called.append("called")

    monkeypatch.setattr(table, "installed_torch_version", lambda: version)
    distributed.start_sequence_numbers(Gloo())
    assert len(called) == calls


# ------------------------------------------------------------------ reading the source


@cache
def source_files() -> tuple[Path, ...]:
    return tuple(sorted(SOURCE.rglob("*.py")))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each private name that a module uses, and that is not its own or of others."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    aliases = torch_aliases(nodes)
    passing = own_attributes(nodes) | {name for names in NAMES_OF_OTHERS.values() for name in names.split()}
    for node in nodes:
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))]
            case ast.ImportFrom(module=str(origin)) if origin.partition(".")[0] == "torch":
                private_module = any(map(is_private, origin.split(".")))
                names = [
                    f"{origin}:{alias.name}"
                    for alias in node.names
                    if private_module or is_private(alias.name)
                ]
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if ast.unparse(value) in ("self", "cls", "super()"):
                    is_known = name in passing or name in attributes_of_wanma()
                else:
                    is_known = name in passing and name not in private_rows()
                names = [] if is_known else [name]
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                names = [name for name in names_in_text(text) if name not in passing]
            case ast.Call():
                names = [keyword.arg for keyword in node.keywords if keyword.arg in private_rows() - passing]
                names += attribute_lookups(node, aliases)
            case ast.ClassDef():
                names = overridden_names(node, aliases)
            case _:
                continue
        yield from ((node.lineno, name) for name in names)


def own_attributes(nodes: list[ast.AST]) -> set[str]:
    """Return the attributes that the classes of a module define."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names |= {inner.name for inner in ast.walk(node) if isinstance(inner, NAMED)} | class_body(node)
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@cache
def attributes_of_wanma() -> set[str]:
    """Return the attributes of all classes outside the room, which a class may inherit; but no row's."""
    files = [path for path in source_files() if not path.is_relative_to(ROOM)]
    own = {name for path in files for name in own_attributes(nodes_of(path))}
    return own - private_rows()


@cache
def private_rows() -> set[str]:
    """Return the private last parts of the table's names."""
    return {name for row in TORCH_INTERNALS if is_private(name := re.split(r"[.:]", row.name)[-1])}


def class_body(node: ast.ClassDef) -> set[str]:
    """Return the names that a class's body defines."""
    names = {statement.name for statement in node.body if isinstance(statement, NAMED)}
    for statement in node.body:
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def names_in_text(text: str) -> list[str]:
    """Return torch's private modules in a text, its words that are rows, and the text if it is a name."""
    modules = re.findall(r"\btorch(?:\.\w+)*?\._\w+(?:\.\w+)*", text)
    words = re.split(r"[\s.:]+", text)
    named = [word for word in words if word in private_rows() or (len(words) == 1 and is_private(word))]
    return modules or [name for name in named if name.isidentifier() and name not in classes_of_wanma()]


@cache
def classes_of_wanma() -> set[str]:
    nodes = (node for path in source_files() for node in nodes_of(path))
    return {node.name for node in nodes if isinstance(node, ast.ClassDef)}


def torch_aliases(nodes: list[ast.AST]) -> dict[str, str]:
    """Return what the imports of a module call torch's modules: {"dist": "torch.distributed"}."""
    aliases = {"torch": "torch"}
    for node in nodes:
        for alias in getattr(node, "names", ()) if isinstance(node, ast.Import | ast.ImportFrom) else ():
            origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            name = f"{origin}{alias.name}"
            if name.startswith("torch.") and (alias.asname or isinstance(node, ast.ImportFrom)):
                aliases[alias.asname or alias.name] = name
    return aliases


def attribute_lookups(node: ast.Call, aliases: dict[str, str]) -> Iterator[str]:
    """Yield the name that a call looks up in one of torch's modules, which may be without it."""
    match node:
        case ast.Call(
            func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id=alias), ast.Constant(value=name), *_]
        ) if alias in aliases:
            yield f"{aliases[alias]}:{name}"


def overridden_names(node: ast.ClassDef, aliases: dict[str, str]) -> list[str]:
    """Return the private names in a class's body that are rows, or that its base classes of torch have."""
    bases = [found for base in node.bases if (found := torch_object(ast.unparse(base), aliases)) is not None]
    return [
        name
        for name in class_body(node)
        if is_private(name) and (name in private_rows() or any(hasattr(base, name) for base in bases))
    ]


def torch_object(name: str, aliases: dict[str, str]) -> Any:
    """Return the object of torch that a name of a module stands for; None for others."""
    first, *rest = name.split(".")
    if first not in aliases:
        return None
    module_name, _, attribute = aliases[first].rpartition(".")
    found: Any = getattr(importlib.import_module(module_name), attribute) if module_name else torch
    for part in rest:
        found = getattr(found, part)
    return found


# ------------------------------------------------------------------ reading torch


def has_row(name: str) -> bool:
    """Return whether the table has a name as the source uses it: of an import, an attribute or a text."""
    if ":" in name:
        return name in {row.name for row in TORCH_INTERNALS}
    parts = {part for row in TORCH_INTERNALS for part in re.split(r"[.:]", row.name)}
    modules = [row.name.replace(":", ".") for row in TORCH_INTERNALS]
    if "." in name:
        return any(module == name or module.startswith(f"{name}.") for module in modules)
    return name.removesuffix("Backward") in parts or name in parts


def used_form(row: TorchInternal) -> str:
    """Return the word by which the source uses a row; autograd's nodes have the name of a class and more."""
    name = re.split(r"[.:]", row.name)[-1]
    return f"{name}Backward" if row.name.startswith("torch.distributed.tensor._api:") else name


def nll_loss_node() -> Any:
    logits = torch.zeros(2, 3, requires_grad=True)
    return F.nll_loss(logits, torch.zeros(2, dtype=torch.int64)).grad_fn


EXAMPLES: dict[str, Callable[[], Any]] = {"torch.autograd.graph:NllLossBackward0": nll_loss_node}
"""Objects of classes that torch does not name."""


def exists(name: str) -> bool:
    """Return whether the installed torch has a name of the table, be it an attribute that a method sets."""
    module, _, path = name.partition(":")
    owner_name, _, last = path.rpartition(".")
    if (example := EXAMPLES.get(f"{module}:{owner_name}")) is not None:
        return hasattr(example(), last)
    owner: Any = torch.ops
    try:
        if module.startswith("torch.ops"):
            for part in module.split(".")[2:]:
                owner = getattr(owner, part)
        else:
            owner = importlib.import_module(module)
        for part in owner_name.split(".") if owner_name else ():
            owner = getattr(owner, part)
    except (ImportError, AttributeError):
        return False
    return hasattr(owner, last) or (inspect.isclass(owner) and last in attributes_in_source(owner))


@cache
def attributes_in_source(kind: type) -> set[str]:
    """Return the attributes that a class and its bases declare, or set in their methods."""
    names: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch.") and not base.__module__.startswith("torch._C"):
            nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))))
            names |= own_attributes(nodes)
    return names
