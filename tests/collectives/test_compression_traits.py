"""Tables of compression methods: each has a row for every method, and no other code names one."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

import wanma
from wanma.collectives.compression.compression_traits import (
    COMPRESSION_TRAITS,
    ERROR_FEEDBACK_METHODS,
)
from wanma.collectives.compression.compressor_table import make_codec, make_compressor
from wanma.job.sections.parallel import Compression, ParallelSection
from wanma.planner.cost.compression_cost import COMPRESSION_COSTS

METHODS: tuple[Compression, ...] = get_args(Compression)
SOURCE = Path(wanma.__file__).parent
PLACES = {
    "job/sections/parallel.py": "name, and its word in the key's description",
    "collectives/compression/compression_traits.py": "traits",
    "collectives/compression/compressor_table.py": "compressor",
    "planner/cost/compression_cost.py": "cost",
}
"""Files of `src/wanma` that a new compression method changes, beside that of its compressor."""


@pytest.mark.parametrize("method", ["topk", "powersgd"])
def test_a_method_is_named_in_four_places(method: str) -> None:
    """The other methods' names are those of number formats as well."""
    mentioning = {path: text for path in SOURCE.rglob("*.py") if method in (text := path.read_text())}
    naming = {
        path.relative_to(SOURCE).as_posix()
        for path, text in mentioning.items()
        if any(isinstance(node, ast.Constant) and node.value == method for node in ast.walk(ast.parse(text)))
    }
    assert naming == PLACES.keys()


def test_every_table_has_a_row_for_every_method_in_the_order_of_the_names() -> None:
    assert tuple(COMPRESSION_TRAITS) == METHODS
    assert tuple(COMPRESSION_COSTS) == tuple(method for method in METHODS if method != "none")
    assert all(make_compressor(method, 0.1) for method in METHODS)
    description = str(ParallelSection.model_fields["compression"].description)
    assert [method for method in METHODS if method not in description] == ["none"]


def test_each_key_of_a_method_is_read_by_that_one_alone() -> None:
    keys = Counter(traits.job_key for traits in COMPRESSION_TRAITS.values() if traits.job_key)
    assert set(keys.values()) == {1}
    assert keys.keys() <= ParallelSection.model_fields.keys()


@pytest.mark.parametrize("method", METHODS)
def test_traits_cost_and_compressor_agree(method: Compression) -> None:
    traits, codec = COMPRESSION_TRAITS[method], make_codec(method)
    if codec is not None:
        assert codec.uses_error_feedback == (method in ERROR_FEEDBACK_METHODS)
    if method != "none":
        cost = COMPRESSION_COSTS[method]
        assert (cost.exchange == "all_to_all_and_all_gather") == (codec is not None)
        assert (cost.cpu_traffic_bytes is not None) == traits.has_native_codec
