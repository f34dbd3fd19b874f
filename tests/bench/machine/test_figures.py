"""Figures of an execution: rates from the times of cases, and the definitions of all of them."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.bench.figures.metrics import find_metric
from wanma.bench.machine.figures import attention_flops, execution_figures
from wanma.bench.machine_figures.case_names import CaseParts, case_name, parse_case
from wanma.bench.machine_figures.definitions import is_machine_detail, machine_definition


def case(
    name: str, *by_rank: float, ranks: tuple[int, ...] = (), is_disturbed: bool = False
) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": sum(by_rank) / len(by_rank),
        "seconds_by_rank": by_rank,
        "ranks": ranks,
        "is_disturbed": is_disturbed,
    }


CONTENT = {
    "backend": "gloo",
    "processors": 0,
    "cases": [
        case("product.bf16.64x64x64", 1e-5, 1e-5),
        case("product.bf16.1024x512x512", 1e-3, 3e-3),
        case("product.fp32.64x64x64", 1e-4, 1e-4, is_disturbed=True),
        case("attention.fp32.2x512x8x64", 0.01, 0.01),
        case("copy.1000", 1e-6, 2e-6),
        case("stream.4000", 1e-6, 1e-6),
        case("stream.100", 1e-9, 1e-9),
        case("dispatch.64", 64e-6, 64e-6),
        case("pair_latency.0-1", 2e-5, 4e-5, ranks=(0, 1)),
        case("pair_stream.0-1.1000", 1e-6, 1e-6, ranks=(0, 1)),
        case("pair_stream.1-0.1000", 4e-6, 4e-6, ranks=(0, 1)),
        case("bisection.1000", 2e-6, 2e-6),
        case("send.backend.fp32.1000", 5e-6, 5e-6),
        case("all_reduce.backend.fp32.100", 1e-5, 1e-5),
        case("all_reduce.ring.fp32.100", 2e-5, 2e-5),
        case("all_reduce.ring.fp32.1000", 2e-5, 2e-5),
        case("disk.1000", 1e-3, 1e-3),
        case("storage_random_read.32x4096", 0.1, 0.1),
        case("storage_flush.4096", 1e-4, 1e-4),
    ],
}


def test_rates_follow_from_times() -> None:
    found = execution_figures(CONTENT, 2)
    assert found["products.bf16_flops_per_second"] == pytest.approx(2 * 1024 * 512 * 512 / 2e-3)
    assert found["rank.0.products.bf16_flops_per_second"] == pytest.approx(2 * 1024 * 512 * 512 / 1e-3)
    assert found["rank.1.products.bf16_flops_per_second"] == pytest.approx(2 * 1024 * 512 * 512 / 3e-3)
    assert found["attention.fp32_flops_per_second"] == pytest.approx(2 * 2 * 512 * 512 * 8 * 64 / 0.01)
    assert found["memory_copy_bytes_per_second"] == pytest.approx(1000 / 1.5e-6)
    assert found["memory_stream_bytes_per_second"] == pytest.approx(4e9), "the longest, beyond the caches"
    assert found["operator_seconds"] == pytest.approx(1e-6)
    assert found["pair.0-1.latency_seconds"] == pytest.approx(3e-5)
    assert found["pair.1-0_bytes_per_second"] == pytest.approx(0.25e9)
    assert found["link_bytes_per_second"] == pytest.approx((1e9 + 0.25e9) / 2)
    assert found["bisection_bytes_per_second"] == pytest.approx(0.5e9)
    assert found["ring_bytes_per_second"] == pytest.approx(0.2e9)
    assert found["all_reduce_latency_seconds"] == pytest.approx(1e-5)
    assert found["all_reduce_bus_bytes_per_second"] == pytest.approx(1000 / 2e-5)
    assert found["storage.write_bytes_per_second"] == pytest.approx(2e6), "both ranks together"
    assert found["storage.random_reads_per_second"] == pytest.approx(640)
    assert found["disturbed_share"] == pytest.approx(1 / 19)
    assert found["pair_latency.0-1_seconds"] == pytest.approx(3e-5), "raw times stay"


def test_a_pair_is_measured_by_its_own_ranks() -> None:
    content = {**CONTENT, "cases": [case("pair_stream.1-2.1000", 0.0, 1e-6, 3e-6, 0.0, ranks=(1, 2))]}
    assert execution_figures(content, 4)["pair.1-2_bytes_per_second"] == pytest.approx(0.5e9)


def test_every_figure_has_a_definition_and_a_unit() -> None:
    for name in execution_figures(CONTENT, 2):
        assert machine_definition(name) is not None, name
        metric = find_metric(name)
        assert metric.definition.endswith("."), name
        assert "{" not in metric.title
    assert find_metric("pair.0-1_bytes_per_second").text(12.5e9) == "12.5 GB/s"
    assert find_metric("rank.1.products.bf16_flops_per_second").title == "Matrix products, bf16, rank 1"
    assert find_metric("all_reduce_latency_seconds").title == "All-reduce latency"


def test_figures_of_other_programs_are_not_taken_for_those_of_a_machine() -> None:
    for name in ("step_seconds", "my_latency_seconds", "tokens_per_second", "a.b_seconds", "accuracy"):
        assert machine_definition(name) is None
        assert not is_machine_detail(name)


def test_names_have_all_parts() -> None:
    assert case_name("product", "bf16", (1, 2, 3)) == "product.bf16.1x2x3"
    assert parse_case("product.bf16.1x2x3_seconds") == CaseParts("product", "", "bf16", (), (1, 2, 3))
    assert parse_case("all_reduce.halving_doubling.fp32.4096") == CaseParts(
        "all_reduce", "halving_doubling", "fp32", (), (4096,)
    )
    assert parse_case("pair_stream.12-3.64") == CaseParts("pair_stream", "", "", (12, 3), (64,))
    assert parse_case("step") is None


def test_attention_backward_has_five_products_where_forward_has_two() -> None:
    shape = (1, 8, 2, 4)
    assert attention_flops("attention_backward", shape) == 2.5 * attention_flops("attention", shape)
