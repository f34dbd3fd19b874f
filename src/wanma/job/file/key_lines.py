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


def toml_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table and list element of valid TOML."""
    return _TomlScanner(text).lines()


def toml_tokens(text: str) -> list[Token]:
    """Return the keys, texts and truth values of valid TOML in order; line ends count as one character."""
    scanner = _TomlScanner(text)
    scanner.lines()
    return scanner.tokens


def yaml_tokens(node: Any) -> list[Token]:
    """Return the keys and text values of a composed YAML node; an aliased one at each of its paths."""
    return list(_yaml_tokens(node, (), ()))


def yaml_key_lines(node: Any) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key and list element of a composed YAML node (`yaml.compose`)."""
    lines: dict[KeyPath, int] = {}
    for path, line in _walk_yaml(node, (), ()):
        lines.setdefault(path, line)
    return lines


def _walk_yaml(node: Any, parent: KeyPath, ancestor_ids: tuple[int, ...]) -> Iterator[tuple[KeyPath, int]]:
    if id(node) in ancestor_ids:  # an anchor that holds itself
        return
    ancestor_ids = (*ancestor_ids, id(node))
    if node.id == "mapping":
        for key, value in node.value:
            path = (*parent, str(key.value))
            yield path, key.start_mark.line + 1
            yield from _walk_yaml(value, path, ancestor_ids)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            yield (*parent, index), value.start_mark.line + 1
            yield from _walk_yaml(value, (*parent, index), ancestor_ids)


def _yaml_tokens(node: Any, parent_path: KeyPath, ancestor_ids: tuple[int, ...]) -> Iterator[Token]:
    if id(node) in ancestor_ids:  # an anchor that holds itself
        return
    ancestor_ids = (*ancestor_ids, id(node))
    if node.id == "mapping":
        for key, value in node.value:
            path = (*parent_path, str(key.value))
            yield _yaml_token(path, key, is_key=True)
            yield from _yaml_tokens(value, path, ancestor_ids)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            yield from _yaml_tokens(value, (*parent_path, index), ancestor_ids)
    else:
        yield _yaml_token(parent_path, node, is_key=False)


def _yaml_token(path: KeyPath, node: Any, *, is_key: bool) -> Token:
    """Return the token of a scalar, without the anchor or tag before it."""
    stop, quotes = node.end_mark.index, 2 if node.style in ("'", '"') else 0
    start = max(stop - len(str(node.value)) - quotes, node.start_mark.index)
    return Token(path, start, stop, node.start_mark.line + 1, is_key)


class _TomlScanner:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.offset = 0
        self.line = 1
        self.lines_by_key: dict[KeyPath, int] = {}
        self.tokens: list[Token] = []
        self.element_indices: dict[KeyPath, int] = {}
        """Elements found so far in each array of tables."""

    def lines(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while self._skip_blank():
            if self._peek() == "[":
                table = self._header()
            else:
                self._pair(table)
        return self.lines_by_key

    def _header(self) -> KeyPath:
        repeated = self.text.startswith("[[", self.offset)
        self._advance(2 if repeated else 1)
        keys = self._key("]")
        self._advance(2 if repeated else 1)
        path: KeyPath = ()
        for position, (key, start, stop) in enumerate(keys):
            path = (*path, key)
            self._record_line(path)
            self.tokens.append(Token(path, start, stop, self.line, is_key=True))
            if repeated and position == len(keys) - 1:
                self.element_indices[path] = self.element_indices.get(path, -1) + 1
            if path in self.element_indices:
                path = (*path, self.element_indices[path])
                self._record_line(path)
        return path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for key, start, stop in self._key("="):
            path = (*path, key)
            self._record_line(path)
            self.tokens.append(Token(path, start, stop, self.line, is_key=True))
        self._advance(1)
        self._value(path)

    def _key(self, end: str) -> list[tuple[str, int, int]]:
        """Read the parts of a dotted key, up to (not past) `end`: name, start and stop of each."""
        parts = []
        while True:
            self._skip_spaces()
            start = self.offset
            if self._peek() in "\"'":
                name = next(iter(tomllib.loads(f"{self._string()} = 0")))
            else:
                while self._peek() not in f". \t{end}":
                    self._advance(1)
                name = self.text[start : self.offset]
            parts.append((name, start, self.offset))
            self._skip_spaces()
            if self._peek() == end:
                return parts
            self._advance(1)  # the dot

    def _value(self, path: KeyPath) -> None:
        self._skip_spaces()
        first, start, line = self._peek(), self.offset, self.line
        if first in "\"'":
            self._string()
            self.tokens.append(Token(path, start, self.offset, line, is_key=False))
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            while self.offset < len(self.text) and self._peek() not in ",]}#\n":
                self._advance(1)
            word = self.text[start : self.offset].rstrip()
            if word in ("true", "false"):
                self.tokens.append(Token(path, start, start + len(word), line, is_key=False))

    def _array(self, path: KeyPath) -> None:
        self._advance(1)
        index = 0
        while self._skip_blank() and self._peek() != "]":
            if self._peek() == ",":
                self._advance(1)
                continue
            self._record_line((*path, index))
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
        start = self.offset
        quote = self._peek()
        mark = quote * 3 if self.text.startswith(quote * 3, self.offset) else quote
        self._advance(len(mark))
        while not self.text.startswith(mark, self.offset):
            self._advance(2 if quote == '"' and self._peek() == "\\" else 1)
        self._advance(len(mark))
        while len(mark) == 3 and self._peek() == quote:  # a quote may touch the closing ones
            self._advance(1)
        return self.text[start : self.offset]

    def _record_line(self, path: KeyPath) -> None:
        self.lines_by_key.setdefault(path, self.line)

    def _peek(self) -> str:
        return self.text[self.offset : self.offset + 1] or "\n"

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.offset, self.offset + count)
        self.offset += count

    def _skip_spaces(self) -> None:
        while self._peek() in " \t":
            self._advance(1)

    def _skip_blank(self) -> bool:
        """Skip spaces, line ends and comments; return False at the end of the text."""
        while self.offset < len(self.text):
            if self._peek() == "#":
                end = self.text.find("\n", self.offset)
                self._advance((end if end >= 0 else len(self.text)) - self.offset)
            elif self._peek() in " \t\n":
                self._advance(1)
            else:
                return True
        return False
