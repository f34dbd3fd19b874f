"""Forecast of the text preparation before the first step: time, cause, ways out."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from support.problems import problem
from wanma.job.cluster import NodeGroup
from wanma.job.forecast.data_feed import StoreRates, TextPreparation
from wanma.job.plan.plan import Plan
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.text_preparation import (
    ASSUMED_BYTES_PER_SECOND,
    forecast_preparation,
    preparation_reasons,
    preparation_text,
)

NODE = NodeGroup("node", 16, 1 << 40, ())
MIB = 1 << 20
TEXT = TextPreparation(
    text_bytes=12_288 * MIB,
    missing_bytes=12_288 * MIB,
    bytes_per_second=3.0 * MIB,
    rate_origin="measured by a preparation on 2026-11-26",
    per_process_bytes=4 * MIB,
    is_remote=False,
)
REMOTE = replace(TEXT, is_remote=True, store=StoreRates(bytes_per_second=24.0 * MIB, origin="measured now"))


def test_the_time_is_that_of_the_tokenizer_on_the_cores_of_a_node() -> None:
    found = forecast_preparation(TEXT, NODE, 8)
    assert (found.processes, found.seconds) == (16, pytest.approx(12_288 / (3 * 16)))
    assert preparation_text(found) == (
        "the text is tokenized before the first step: 12.0 GiB in 4 min 16 s, while 8 devices wait "
        "(tokenizing, 16 processes: 48.0 MiB/s); `wanma data prepare` does it beforehand, without the "
        "devices; with a common data.cache on several nodes at once"
    )
    assert preparation_reasons(TEXT, found)[1:] == (
        "tokenizing: 3.0 MiB/s and process, measured by a preparation on 2026-11-26",
    )


def test_a_slow_store_is_the_cause_where_it_gives_less() -> None:
    found = forecast_preparation(REMOTE, NODE, 1)
    assert [limit.cause for limit in found.limits] == ["store bandwidth", "tokenizing"]
    assert found.seconds == pytest.approx(12_288 / 24)
    assert preparation_text(found).startswith("the text is downloaded and tokenized before")
    assert "(store bandwidth: 24.0 MiB/s)" in preparation_text(found)
    assert found.remedies[1] == "a copy of the text on the nodes' disks is read faster"
    assert found.origins[1].endswith("GB/s per node, measured now")


def test_a_small_text_takes_fewer_processes() -> None:
    found = forecast_preparation(replace(TEXT, missing_bytes=9 * MIB), NODE, 1)
    assert (found.processes, found.seconds) == (2, pytest.approx(1.5))
    assert (found.remedies, preparation_reasons(TEXT, found)) == ((), ())


def test_prepared_text_needs_nothing() -> None:
    assert forecast_preparation(replace(TEXT, missing_bytes=0), NODE, 8) is None
    assert forecast_preparation(None, NODE, 8) is None


def test_an_assumed_rate_says_so() -> None:
    unknown = replace(TEXT, bytes_per_second=None, rate_origin="assumed: a.parquet is no text (Parquet)")
    found = forecast_preparation(unknown, NODE, 8)
    assert found.seconds == pytest.approx(12_288 * MIB / (16 * ASSUMED_BYTES_PER_SECOND))
    assert found.origins[0].endswith("and process, assumed: a.parquet is no text (Parquet)")


def test_text_that_is_not_here_is_unknown_and_said() -> None:
    absent = TextPreparation(0, 0, None, "", 1, is_remote=False, fault="data.text[0]: 'a' does not exist")
    assert preparation_reasons(absent, None) == (
        "the time to tokenize the text is unknown: data.text[0]: 'a' does not exist",
    )


def test_a_plan_has_the_preparation_with_its_reasons() -> None:
    of = problem()
    of = replace(of, workload=replace(of.workload, preparation=TEXT))
    made = forecast_plan(of, Plan(dp_replicate=8, micro_batch=2, precision="bf16", device="cuda"))
    assert made.preparation is not None
    assert preparation_text(made.preparation) in made.reasons
    assert made.to_json()["preparation"] == asdict(made.preparation)
    assert type(of.workload).from_json(of.workload.to_json()) == of.workload
