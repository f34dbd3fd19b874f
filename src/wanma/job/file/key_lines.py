"""Lines and positions of the keys of a job file, for errors that point at a line and for upgrades in place.

Neither `tomllib` nor PyYAML's plain loader keeps them. The TOML scanner reads text that `tomllib` has
already accepted, so it follows structure and validates nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str | int, ...]
"""Path of a key: names and list positions from the root, such as ('data', 'sources', 0, 'weight')."""


@dataclass(frozen=True)
class Token:
    """Name of a key, or a text value, where a file has it."""

    path: KeyPath
    start: int
    """Position of the first character in the text, quotes included."""
    stop: int
    line: int
    is_key: bool


def toml_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table and list element of valid TOML."""
    return _Scanner(text).lines()


def toml_tokens(text: str) -> list[Token]:
    """Return the keys and text values of valid TOML in their order; line ends count as one character."""
    scanner = _Scanner(text)
    scanner.lines()
    return scanner.tokens


def yaml_tokens(node: Any) -> list[Token]:
    """Return the keys and text values of a composed YAML node; an aliased one at each of its paths."""
    return list(_yaml_tokens(node, (), ()))


def yaml_lines(node: Any) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key and list element of a composed YAML node (`yaml.compose`)."""
    found: dict[KeyPath, int] = {}
    for path, line in _yaml_walk(node, (), ()):
        found.setdefault(path, line)
    return found


def _yaml_walk(node: Any, at: KeyPath, inside: tuple[int, ...]) -> Iterator[tuple[KeyPath, int]]:
    if id(node) in inside:  # an anchor that holds itself
        return
    inside = (*inside, id(node))
    if node.id == "mapping":
        for key, value in node.value:
            path = (*at, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _yaml_walk(value, path, inside)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            yield (*at, index), value.start_mark.line + 1
            yield from _yaml_walk(value, (*at, index), inside)


def _yaml_tokens(node: Any, at: KeyPath, inside: tuple[int, ...]) -> Iterator[Token]:
    if id(node) in inside:  # an anchor that holds itself
        return
    inside = (*inside, id(node))
    if node.id == "mapping":
        for key, value in node.value:
            path = (*at, str(key.value))
            yield _yaml_token(path, key, is_key=True)
            yield from _yaml_tokens(value, path, inside)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            yield from _yaml_tokens(value, (*at, index), inside)
    else:
        yield _yaml_token(at, node, is_key=False)


def _yaml_token(path: KeyPath, node: Any, *, is_key: bool) -> Token:
    """Return the token of a scalar, without the anchor or tag before it."""
    stop, quotes = node.end_mark.index, 2 if node.style in ("'", '"') else 0
    start = max(stop - len(str(node.value)) - quotes, node.start_mark.index)
    return Token(path, start, stop, node.start_mark.line + 1, is_key)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.found: dict[KeyPath, int] = {}
        self.tokens: list[Token] = []
        self.elements: dict[KeyPath, int] = {}
        """Elements found so far in each array of tables."""

    def lines(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.found

    def _header(self) -> KeyPath:
        repeated = self.text.startswith("[[", self.at)
        self._advance(2 if repeated else 1)
        keys = self._key("]")
        self._advance(2 if repeated else 1)
        path: KeyPath = ()
        for position, (key, start, stop) in enumerate(keys):
            path = (*path, key)
            self._note(path)
            self.tokens.append(Token(path, start, stop, self.line, is_key=True))
            if repeated and position == len(keys) - 1:
                self.elements[path] = self.elements.get(path, -1) + 1
            if path in self.elements:
                path = (*path, self.elements[path])
                self._note(path)
        return path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for key, start, stop in self._key("="):
            path = (*path, key)
            self._note(path)
            self.tokens.append(Token(path, start, stop, self.line, is_key=True))
        self._advance(1)
        self._value(path)

    def _key(self, end: str) -> list[tuple[str, int, int]]:
        """Read the parts of a dotted key, up to (not past) `end`: name, start and stop of each."""
        parts = []
        while True:
            self._skip_spaces()
            start = self.at
            if self._peek() in "\"'":
                name = next(iter(tomllib.loads(f"{self._string()} = 0")))
            else:
                while self._peek() not in f". \t{end}":
                    self._advance(1)
                name = self.text[start : self.at]
            parts.append((name, start, self.at))
            self._skip_spaces()
            if self._peek() == end:
                return parts
            self._advance(1)  # the dot

    def _value(self, path: KeyPath) -> None:
        self._skip_spaces()
        first, start, line = self._peek(), self.at, self.line
        if first in "\"'":
            self._string()
            self.tokens.append(Token(path, start, self.at, line, is_key=False))
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            while self.at < len(self.text) and self._peek() not in ",]}#\n":
                self._advance(1)

    def _array(self, path: KeyPath) -> None:
        self._advance(1)
        index = 0
        while self._skip_blank() and self._peek() != "]":
            if self._peek() == ",":
                self._advance(1)
                continue
            self._note((*path, index))
            self._value((*path, index))
            index += 1
        self._advance(1)

    def _inline_table(self, path: KeyPath) -> None:
        self._advance(1)
        while self._skip_blank() and self._peek() != "}":
            if self._peek() == ",":
                self._advance(1)
            else:
                self._pair(path)
        self._advance(1)

    def _string(self) -> str:
        """Skip one string; return it as written, quotes included."""
        start = self.at
        quote = self._peek()
        mark = quote * 3 if self.text.startswith(quote * 3, self.at) else quote
        self._advance(len(mark))
        while not self.text.startswith(mark, self.at):
            self._advance(2 if quote == '"' and self._peek() == "\\" else 1)
        self._advance(len(mark))
        while len(mark) == 3 and self._peek() == quote:  # a quote may touch the closing ones
            self._advance(1)
        return self.text[start : self.at]

    def _note(self, path: KeyPath) -> None:
        self.found.setdefault(path, self.line)

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1] or "\n"

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _skip_spaces(self) -> None:
        while self._peek() in " \t":
            self._advance(1)

    def _skip_blank(self) -> bool:
        """Skip spaces, line ends and comments; return False at the end of the text."""
        while self.at < len(self.text):
            if self._peek() == "#":
                end = self.text.find("\n", self.at)
                self._advance((end if end >= 0 else len(self.text)) - self.at)
            elif self._peek() in " \t\n":
                self._advance(1)
            else:
                return True
        return False
