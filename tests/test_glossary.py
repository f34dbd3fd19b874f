"""The glossary: every term has a line of its own, and the symbol that it names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
ROWS = re.findall(
    r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \| `(wanma\.[\w.]+)` \|$", GLOSSARY.read_text(), re.MULTILINE
)


def test_every_line_of_the_table_has_four_columns() -> None:
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    assert len(lines) - 2 == len(ROWS)


def test_terms_are_sorted_and_stand_once() -> None:
    terms = [term.strip("`").lower() for term, *_ in ROWS]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "symbol"), [(term, symbol) for term, _, _, symbol in ROWS])
def test_the_symbol_of_a_term_exists(term: str, symbol: str) -> None:
    parts = symbol.split(".")
    for count in range(len(parts), 1, -1):
        path = ROOT / "src" / "/".join(parts[:count])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            name = ".".join(parts[count:])
            assert not name or name in symbols(file), f"{term}: {file.relative_to(ROOT)} has no {name}"
            return
    pytest.fail(f"{term}: there is no module of {symbol}")


@cache
def symbols(file: Path) -> frozenset[str]:
    """Qualified names of the classes, functions, constants and attributes that a file defines."""
    return frozenset(_defined(ast.parse(file.read_text()).body, ""))


def _defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef():
                yield prefix + node.name
                yield from _defined(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + node.name
                if prefix:
                    yield from (prefix + name for name in _attributes_set(node))
            case ast.Assign(targets):
                names = (name for target in targets for name in ast.walk(target))
                yield from (prefix + name.id for name in names if isinstance(name, ast.Name))
            case ast.AnnAssign(ast.Name(name)):
                yield prefix + name
            case ast.If() | ast.Try():
                yield from _defined(node.body, prefix)


def _attributes_set(method: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name
