"""Pages of the metrics and the alerts are what the catalogue and the rules say."""

from __future__ import annotations

from support.observe_pages import pages


def test_the_pages_are_those_of_the_source() -> None:
    for path, text in pages().items():
        assert path.read_text() == text, "PYTHONPATH=tests python -m support.observe_pages writes it anew"
