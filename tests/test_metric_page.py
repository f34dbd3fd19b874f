"""docs/reference/benchmark-metrics.md is what the metrics say."""

from __future__ import annotations

from support.metric_page import PAGE, page


def test_the_page_is_generated_from_the_metrics() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "a metric has changed: PYTHONPATH=tests python -m support.metric_page writes the page anew"
    )
