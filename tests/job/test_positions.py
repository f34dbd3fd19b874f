"""Lines of keys: checked against TOML and YAML of every shape."""

from __future__ import annotations

import tomllib
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from wanma.job.file.key_lines import KeyPath, toml_key_lines, yaml_key_lines

TEXT = r'''
top = 1  # [not.a.table]
"quoted key" = "a # b = c"
dotted . inner."x.y" = 'its'  # no
multi = """
[nor.this]
key = 1 \""" = 2
""""
literal = TRIPLE
x = 1
'TRIPLE
[table] # [x]
list = [ # comment ]
  1, [2, 3],
  { a = 1, b.c = [
     4 ] },
]
inline = { x = 1, y = { z = "}" } }

[table.below]
k = 2026-01-01 00:00:00
[[many]]
n = 1
[many.sub]
m = 1
[[many]]
n = 2
[[many.deep]]
o = 1
[[many.deep]]
o = 2
'''.replace("TRIPLE", "'''")


def test_every_key_of_a_hard_file_is_found_on_its_line() -> None:
    found = toml_key_lines(TEXT)
    expected: dict[KeyPath, int] = {
        ("top",): 2,
        ("quoted key",): 3,
        ("dotted", "inner", "x.y"): 4,
        ("multi",): 5,
        ("literal",): 9,
        ("table",): 12,
        ("table", "list"): 13,
        ("table", "list", 0): 14,
        ("table", "list", 1, 1): 14,
        ("table", "list", 2, "a"): 15,
        ("table", "list", 2, "b", "c", 0): 16,
        ("table", "inline", "y", "z"): 18,
        ("table", "below", "k"): 21,
        ("many", 0, "n"): 23,
        ("many", 0, "sub", "m"): 25,
        ("many", 1, "n"): 27,
        ("many", 1, "deep", 0, "o"): 29,
        ("many", 1, "deep", 1, "o"): 31,
    }
    assert {path: found.get(path) for path in expected} == expected
    assert set(found) == set(paths(tomllib.loads(TEXT)))


def paths(value: Any, at: KeyPath = ()) -> list[KeyPath]:
    """Every key and list position of parsed TOML."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path for key, inner in items for path in ((*at, key), *paths(inner, (*at, key)))]


words = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), min_size=1, max_size=6)
values = st.recursive(
    st.one_of(st.integers(), st.booleans(), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(words, values, min_size=1, max_size=5), st.integers(0, 3))
def test_each_key_of_any_file_is_found_on_the_line_it_was_written_on(
    tables: dict[str, Any], gap: int
) -> None:
    from wanma.job.file.serialization import toml_value

    lines = [f"{toml_value(key)} = {toml_value(value)}" for key, value in tables.items()]
    text = ("\n" * (gap + 1)).join(lines)
    found = toml_key_lines(text)
    assert set(found) == set(paths(tomllib.loads(text)))
    for index, key in enumerate(tables):
        assert found[(key,)] == 1 + index * (gap + 1)


def test_yaml_marks_give_the_lines_of_mappings_and_sequences() -> None:
    text = "a: 1\nb:\n  c:\n    - d: 2\n      e: [3,\n        4]\n"
    assert yaml_key_lines(yaml.compose(text)) == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 4,
        ("b", "c", 0, "d"): 4,
        ("b", "c", 0, "e"): 5,
        ("b", "c", 0, "e", 0): 5,
        ("b", "c", 0, "e", 1): 6,
    }


def test_a_yaml_anchor_that_holds_itself_ends() -> None:
    assert yaml_key_lines(yaml.compose("a: &x\n  b: *x\n")) == {("a",): 1, ("a", "b"): 2}
