"""Files of `wanma observe render`: scrape configuration, rules, runbook, data source and dashboards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wanma.job.run.run_directory import write_atomically, write_json
from wanma.observe.alerts.rules import RULES, Rule
from wanma.observe.endpoint import TARGETS_FOLDER
from wanma.observe.render.dashboards import DATA_SOURCE, dashboards
from wanma.observe.series.catalogue import RUN_LABELS

SCRAPE_SECONDS = 15


def render_files(
    folder: Path,
    runs: Path,
    prometheus_url: str,
    *,
    token_file: Path | None = None,
    targets_url: str | None = None,
    runbook_url: str | None = None,
    alertmanager_url: str | None = None,
) -> list[Path]:
    """Write the files below a folder; return them.

    Args:
        folder: folder, made if it is missing; files of the same names are replaced.
        runs: folder of the run directories, in which Prometheus finds the endpoints.
        prometheus_url: address of Prometheus, for Grafana.
        token_file: file with the token of the endpoints (observe.metrics_token); None: they have none.
        targets_url: address at which Prometheus asks for the endpoints instead; None: files below `runs`.
        runbook_url: address of the runbook, to which alerts link; None: that of the file.
        alertmanager_url: address of Alertmanager; None: Prometheus only shows alerts.

    Raises:
        OSError: a file cannot be written.
    """
    runbook_url = runbook_url or (folder.absolute() / "runbook.md").as_uri()
    source = {"name": "wanma", "access": "proxy", "url": prometheus_url, **DATA_SOURCE}
    options = {"path": str((folder / "grafana/dashboards").absolute())}
    provider = {"name": "wanma", "type": "file", "options": options}
    contents: dict[str, Any] = {
        "prometheus/prometheus.yml": _configuration(runs, token_file, targets_url, alertmanager_url),
        "prometheus/wanma-rules.yml": alerting_rules(runbook_url),
        "runbook.md": runbook(),
        "grafana/provisioning/datasources/wanma.yml": {"apiVersion": 1, "datasources": [source]},
        "grafana/provisioning/dashboards/wanma.yml": {"apiVersion": 1, "providers": [provider]},
        **{f"grafana/dashboards/{uid}.json": dashboard for uid, dashboard in dashboards().items()},
    }
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            write_atomically(path, content)
        else:
            write_json(path, content)  # which is YAML, too
    return [folder / name for name in contents]


def alerting_rules(runbook_url: str) -> dict[str, Any]:
    """Return the rules as a rule file of Prometheus has them, each with a link into the runbook."""
    rules = [
        {
            "alert": rule.name,
            "expr": rule.condition.promql,
            "for": f"{rule.for_seconds:g}s",
            "labels": {"severity": rule.severity},
            "annotations": {
                "summary": _summary(rule),
                "description": " · ".join(rule.causes),
                "runbook_url": f"{runbook_url}#{rule.name.lower()}",
            },
        }
        for rule in RULES
    ]
    return {"groups": [{"name": "wanma", "rules": rules}]}


def runbook() -> str:
    """Return the runbook: for each alert what it means, and what to look at."""
    text = "# Runbook\n\n"
    text += "Alerts and their usual causes, the most frequent one first; `wanma diagnose RUN` looks at all."
    for rule in RULES:
        hold = f"after it has held for {rule.for_seconds:g} s" if rule.for_seconds else "as soon as it holds"
        text += f"\n\n## {rule.name}\n\n{rule.severity.capitalize()}, {hold}:\n\n"
        text += f"```text\n{rule.condition.promql}\n```\n\n"
        text += "\n".join(f"1. {cause}" for cause in rule.causes)
    return text


def _summary(rule: Rule) -> str:
    """Return the summary with Prometheus's own placeholders."""
    labels = " ".join(
        f"{label} {{{{ $labels.{label} }}}}" for label in rule.condition.labels if label not in RUN_LABELS
    )
    text = rule.summary.replace("{labels}", labels)
    text = re.sub(r"\{value:\.\d%\}", "{{ $value | humanizePercentage }}", text)
    text = re.sub(r"\{value:(\.\d[fg])\}", r'{{ printf "%\1" $value }}', text)
    return f"run {{{{ $labels.run }}}}: {text}"


def _configuration(
    runs: Path, token_file: Path | None, targets_url: str | None, alertmanager_url: str | None
) -> dict[str, Any]:
    # Prometheus watches no folder that is missing when it starts, and sees no change on NFS: it looks again.
    refresh = {"refresh_interval": f"{SCRAPE_SECONDS}s"}
    scrape: dict[str, Any] = {"job_name": "wanma"}
    if targets_url:
        scrape["http_sd_configs"] = [{"url": targets_url, **refresh}]
    else:
        files = [str(runs.absolute() / TARGETS_FOLDER / "*.json")]
        scrape["file_sd_configs"] = [{"files": files, **refresh}]
    if token_file is not None:
        scrape["authorization"] = {"type": "Bearer", "credentials_file": str(token_file.absolute())}
    configuration: dict[str, Any] = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": ["wanma-rules.yml"],
        "scrape_configs": [scrape],
    }
    if alertmanager_url is not None:
        address = urlsplit(alertmanager_url)
        targets = {"scheme": address.scheme, "path_prefix": address.path or "/"}
        manager = {**targets, "static_configs": [{"targets": [address.netloc]}]}
        configuration["alerting"] = {"alertmanagers": [manager]}
    return configuration
