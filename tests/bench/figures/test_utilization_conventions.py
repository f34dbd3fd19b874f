"""MFU of a contender by other conventions: multiples of its own, beside it in one table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.benchmark_results import benchmark_result
from wanma.bench.figures.metrics import CONVENTION_METRICS, find_metric
from wanma.bench.figures.summary import convention_ratios, summarize
from wanma.bench.presentation.page import result_page
from wanma.bench.presentation.result_blocks import conventions_block
from wanma.bench.presentation.result_tables import summaries_csv, summary_metrics
from wanma.bench.results.result import BenchmarkResult, ContenderRecord
from wanma.job.plan.plan import Plan
from wanma.models.config.presets import DECODER_PRESETS
from wanma.models.workload.flop_conventions import training_flops

JOB = """\
[model]
family = "decoder"
layers = 6
hidden = 384
heads = 6

[data]
text = ["stdlib"]
tokenizer = "bytes"
sequence_length = 1024

[train]
global_batch = 8
"""
PEAK = 312e12


def record(name: str = "job", flops: float | None = None, **changes: Any) -> ContenderRecord:
    plan = replace(Plan(), **changes)
    own = training_flops(config(), 1024)["mfu"]
    content = {
        "plan": plan.to_json(),
        "flops_per_sample": own if flops is None else flops,
        "peak_flops_per_second": PEAK,
    }
    return ContenderRecord(name, "job", job=JOB, plan=content)


def config() -> Any:
    ours = DECODER_PRESETS["gpt-10m"]
    assert (ours.layers, ours.hidden, ours.heads) == (6, 384, 6)
    return ours


def summarized(contender: ContenderRecord, mfu: float = 0.4) -> BenchmarkResult:
    plain = benchmark_result({"job": [1.0] * 7})
    measurements = tuple(
        replace(one, steps=tuple(replace(step, mfu=mfu) for step in one.steps)) for one in plain.measurements
    )
    result = replace(plain, contenders=(contender,), measurements=measurements)
    return summarize(result, [0] * len(measurements))


def test_ratios_are_those_of_the_conventions() -> None:
    ratios = convention_ratios(record())
    flops = training_flops(config(), 1024)
    assert ratios == {name: flops[name] / flops["mfu"] for name in CONVENTION_METRICS}
    assert ratios["hfu"] == ratios["mfu_full_attention"] > 1
    recomputing = convention_ratios(record(recompute="full", recompute_share=0.5))
    assert recomputing["hfu"] > ratios["hfu"]
    assert recomputing["mfu_palm"] == ratios["mfu_palm"]


def test_a_command_and_frozen_parameters_have_none() -> None:
    assert convention_ratios(ContenderRecord("x", "command")) == {}
    frozen = 0.7 * training_flops(config(), 1024)["mfu"]
    assert convention_ratios(record(flops=frozen)) == {}
    assert convention_ratios(replace(record(), job="[model]\n")) == {}


def test_a_summary_has_them_without_verdicts_of_their_own() -> None:
    result = summarized(record())
    ratios = convention_ratios(record())
    for name, ratio in ratios.items():
        estimate = result.summaries["job"][name]
        assert estimate.median == pytest.approx(0.4 * ratio)
        assert result.values["job"][name][0] == pytest.approx(0.4 * ratio)
        assert find_metric(name).better == ""
        assert f"job,{name},share" in summaries_csv(result)
    assert not set(CONVENTION_METRICS) & set(summary_metrics(result)), "they have a table of their own"


def test_the_table_has_shares_and_teraflops_of_a_device() -> None:
    result = summarized(record())
    (block,) = conventions_block(result)
    ((name, own, full, palm, *_),) = block.rows
    assert block.columns == ("contender", "MFU", "full attention", "PaLM", "6 N D", "HFU")
    assert (name, own) == ("job", "40.0 % (125)")
    ratio = convention_ratios(record())["mfu_full_attention"]
    assert full == f"{40 * ratio:.1f} % ({0.4 * ratio * 312:.3g})"
    assert palm != full
    page = result_page(result)
    assert "MFU by convention" in page
    assert full in page


def test_without_a_decoder_there_is_no_table() -> None:
    result = benchmark_result({"job": [1.0] * 7})
    assert list(conventions_block(result)) == []
    assert "MFU by convention" not in result_page(result)
