"""Slow links and devices: planted ones are named, and where there are none, none is."""

from __future__ import annotations

import pytest

from support.machine_results import machine_result
from wanma.bench.machine_report.slow_parts import find_slow_parts

REPETITIONS = 120


@pytest.mark.parametrize(("executions", "noise"), [(3, 0.05), (5, 0.05), (10, 0.1)])
def test_where_nothing_is_slow_nothing_is_named(executions: int, noise: float) -> None:
    """At most 5 % may be named falsely; 120 repetitions with 5 % have more than 12 in one of 100 cases."""
    named = [
        bool(find_slow_parts(machine_result(4, executions, noise, seed, has_summaries=False))[0].findings)
        for seed in range(REPETITIONS)
    ]
    assert sum(named) <= 12


def test_one_slow_link_is_named_with_how_slow_it_is() -> None:
    result = machine_result(4, speed=lambda first, second: 0.5 if (first, second) == (1, 2) else 1.0)
    (report,) = find_slow_parts(result)
    bandwidths = [finding for finding in report.findings if "bandwidths" in finding.kind.name]
    (found,) = bandwidths
    assert list(found.ratios) == [(1, 2)]
    assert 0.4 < found.ratios[1, 2].median < 0.6
    assert found.text.startswith("rank 1 to rank 2: ")
    assert "bandwidths of links within a node" in found.text
    latencies = [finding for finding in report.findings if "latencies" in finding.kind.name]
    assert [list(finding.ratios) for finding in latencies] == [[(1, 2)]]


def test_it_is_found_in_nearly_all_repetitions() -> None:
    found = 0
    for seed in range(20):
        result = machine_result(
            4, seed=seed, speed=lambda first, second: 0.5 if first == second - 1 == 1 else 1.0
        )
        found += [(1, 2)] in [list(finding.ratios) for finding in find_slow_parts(result)[0].findings]
    assert found >= 19


def test_a_rank_whose_links_are_all_slow_is_the_cause() -> None:
    for ranks in (4, 8):
        result = machine_result(ranks, 8, speed=lambda first, second: 0.6 if 2 in (first, second) else 1.0)
        (report,) = find_slow_parts(result)
        assert [finding.rank for finding in report.findings] == [2, 2], "bandwidth and latency"
        assert report.texts[0].startswith(f"all {2 * (ranks - 1)} links of rank 2: ")


def test_many_slow_links_are_rather_another_kind_than_faults() -> None:
    """Ranks 0 to 2 on one socket, 3 to 7 on the other: 30 of 56 directed links cross."""
    result = machine_result(8, 10, speed=lambda first, second: 0.5 if (first < 2) != (second < 2) else 1.0)
    (report,) = find_slow_parts(result)
    assert "rather another path" in report.texts[0]
    assert all(len(finding.ratios) > 1 for finding in report.findings)


def test_a_slow_device_is_named() -> None:
    result = machine_result(8, device_speed={5: 0.7})
    found = find_slow_parts(result)[0].findings
    assert {tuple(finding.ratios) for finding in found} == {((5,),)}
    assert {finding.kind.name for finding in found} == {
        "devices in 'Matrix products, bf16'",
        "devices in 'Memory copy'",
    }


def test_links_between_nodes_are_a_kind_of_their_own() -> None:
    result = machine_result(8, nodes=2, speed=lambda first, second: 1.0 if first // 4 == second // 4 else 0.1)
    assert find_slow_parts(result)[0].findings == ()
    slow = machine_result(
        8,
        nodes=2,
        speed=lambda first, second: (
            (1.0 if first // 4 == second // 4 else 0.1) * (0.4 if (first, second) == (0, 4) else 1.0)
        ),
    )
    text = next(text for text in find_slow_parts(slow)[0].texts if "bandwidths" in text)
    assert text.startswith("rank 0 (node 0) to rank 4 (node 1): ")


def test_three_parts_or_two_executions_are_too_few() -> None:
    (report,) = find_slow_parts(machine_result(2, speed=lambda first, _: 0.1 if first else 1.0))
    assert (report.compared, report.findings) == (0, ())
    (report,) = find_slow_parts(
        machine_result(8, 2, speed=lambda first, second: 0.1 if (first, second) == (1, 2) else 1.0)
    )
    assert (report.compared, report.findings) == (0, ())


def test_disturbed_executions_do_not_count() -> None:
    plain, disturbed = machine_result(4, 6), machine_result(4, 6, disturbed={2: 0.2, 4: 0.1})
    metric = "memory_copy_bytes_per_second"
    assert sorted(disturbed.values["ranks=4"][metric]) == [0, 1, 3, 5]
    assert disturbed.summaries["ranks=4"][metric].median == pytest.approx(
        plain.summaries["ranks=4"][metric].median, rel=0.2
    )
    assert find_slow_parts(disturbed)[0].findings == ()
