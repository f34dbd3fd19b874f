"""Files for Prometheus and Grafana."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from wanma.observe.alerts.rules import RULES
from wanma.observe.render.dashboards import dashboards
from wanma.observe.render.files import render_files
from wanma.observe.series.catalogue import CATALOGUE


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    written = render_files(tmp_path / "m", tmp_path / "runs", "http://localhost:9090")
    return {str(path.relative_to(tmp_path / "m")): path.read_text() for path in written}


def test_rules_and_scrape_configuration_are_yaml(files: dict[str, str], tmp_path: Path) -> None:
    (group,) = yaml.safe_load(files["prometheus/wanma-rules.yml"])["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [rule.name for rule in RULES]
    assert not any("{value" in rule["annotations"]["summary"] for rule in group["rules"])
    scrape = yaml.safe_load(files["prometheus/prometheus.yml"])["scrape_configs"][0]
    assert scrape["file_sd_configs"][0]["files"] == [str(tmp_path / "runs" / ".endpoints" / "*.json")]
    assert "authorization" not in scrape


def test_each_alert_has_a_place_in_the_runbook(files: dict[str, str]) -> None:
    for rule in RULES:
        assert f"## {rule.name}\n" in files["runbook.md"]
        assert all(cause in files["runbook.md"] for cause in rule.causes)


def test_a_token_and_a_service_of_targets_are_in_the_scrape_configuration(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8265/targets"
    render_files(tmp_path, tmp_path, "http://localhost", token_file=Path("token"), targets_url=url)
    (scrape,) = yaml.safe_load((tmp_path / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape == {
        "job_name": "wanma",
        "http_sd_configs": [{"url": url, "refresh_interval": "15s"}],
        "authorization": {"type": "Bearer", "credentials_file": str(Path("token").absolute())},
    }


@pytest.mark.parametrize("address", [None, "https://runbooks.example/wanma"])
def test_alerts_link_to_the_runbook(address: str | None, tmp_path: Path) -> None:
    render_files(tmp_path, tmp_path, "http://localhost", runbook_url=address)
    runbook = address or f"file://{tmp_path}/runbook.md"
    (group,) = yaml.safe_load((tmp_path / "prometheus" / "wanma-rules.yml").read_text())["groups"]
    assert [rule["annotations"]["runbook_url"] for rule in group["rules"]] == [
        f"{runbook}#{rule.name.lower()}" for rule in RULES
    ]


def test_dashboards_use_metrics_of_the_catalogue_and_do_not_overlap(files: dict[str, str]) -> None:
    known = {metric.full_name for metric in CATALOGUE.values()}
    assert set(dashboards()) == {"wanma-fleet", "wanma-run"}
    for uid, dashboard in dashboards().items():
        model = json.loads(files[f"grafana/dashboards/{uid}.json"])
        assert model == dashboard
        assert model["uid"] == uid
        taken: set[tuple[int, int]] = set()
        for panel in model["panels"]:
            box = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(box["x"], box["x"] + box["w"])
                for y in range(box["y"], box["y"] + box["h"])
            }
            assert not cells & taken, panel["title"]
            assert box["x"] + box["w"] <= 24
            taken |= cells
            for target in panel.get("targets", ()):
                assert set(re.findall(r"wanma_\w+", target["expr"])) <= known, target["expr"]
            assert panel.get("targets") or panel["type"] == "row", panel["title"]
