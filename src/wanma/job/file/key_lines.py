"""Line numbers of the keys of a job file, so that an error can point at a line.

Neither `tomllib` nor PyYAML's plain loader keeps lines. The TOML scanner reads text that `tomllib` has
already accepted, so it follows structure and validates nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

KeyPath = tuple[str | int, ...]
"""Path of a key: names and list positions from the root, such as ('data', 'sources', 0, 'weight')."""


def toml_lines(text: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table and list element of valid TOML."""
    return _Scanner(text).lines()


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


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.line = 1
        self.found: dict[KeyPath, int] = {}
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
        for position, key in enumerate(keys):
            path = (*path, key)
            self._note(path)
            if repeated and position == len(keys) - 1:
                self.elements[path] = self.elements.get(path, -1) + 1
            if path in self.elements:
                path = (*path, self.elements[path])
                self._note(path)
        return path

    def _pair(self, table: KeyPath) -> None:
        path = table
        for key in self._key("="):
            path = (*path, key)
            self._note(path)
        self._advance(1)
        self._value(path)

    def _key(self, end: str) -> list[str]:
        """Read the parts of a dotted key, up to (not past) `end`."""
        parts = []
        while True:
            self._skip_spaces()
            if self._peek() in "\"'":
                parts.append(next(iter(tomllib.loads(f"{self._string()} = 0"))))
            else:
                start = self.at
                while self._peek() not in f". \t{end}":
                    self._advance(1)
                parts.append(self.text[start : self.at])
            self._skip_spaces()
            if self._peek() == end:
                return parts
            self._advance(1)  # the dot

    def _value(self, path: KeyPath) -> None:
        self._skip_spaces()
        first = self._peek()
        if first in "\"'":
            self._string()
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
