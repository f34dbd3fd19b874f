"""Files of `wanma observe render`: scrape configuration, rules, runbook, data source and dashboards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from wanma.job.run.run_directory import write_atomically
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
    provisioning = "grafana/provisioning"
    runbook_url = runbook_url or (folder.absolute() / "runbook.md").as_uri()
    files: dict[str, str] = {
        "prometheus/prometheus.yml": _json(
            _scrape_configuration(runs, token_file, targets_url) | _alerting(alertmanager_url)
        ),
        "prometheus/wanma-rules.yml": _json(alerting_rules(runbook_url)),
        "runbook.md": "\n".join(runbook()),
        f"{provisioning}/datasources/wanma.yml": _json(
            {
                "apiVersion": 1,
                "datasources": [
                    {"name": "wanma", "access": "proxy", "url": prometheus_url, **DATA_SOURCE},
                ],
            }
        ),
        f"{provisioning}/dashboards/wanma.yml": _json(
            {
                "apiVersion": 1,
                "providers": [
                    {
                        "name": "wanma",
                        "type": "file",
                        "options": {"path": str((folder / "grafana/dashboards").absolute())},
                    }
                ],
            }
        ),
        **{f"grafana/dashboards/{uid}.json": _json(dashboard) for uid, dashboard in dashboards().items()},
    }
    written = []
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        written.append(path)
    return written


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


def runbook() -> Iterator[str]:
    """Yield the lines of the runbook: for each alert what it means, and what to look at."""
    yield "# Runbook"
    yield ""
    yield "Alerts and their usual causes, the most frequent one first; `wanma diagnose RUN` looks at all."
    for rule in RULES:
        yield ""
        yield f"## {rule.name}"
        yield ""
        hold = f"after it has held for {rule.for_seconds:g} s" if rule.for_seconds else "as soon as it holds"
        yield f"{rule.severity.capitalize()}, {hold}:"
        yield ""
        yield "```text"
        yield rule.condition.promql
        yield "```"
        yield ""
        yield from (f"1. {cause}" for cause in rule.causes)


def _summary(rule: Rule) -> str:
    """Return the summary with Prometheus's own placeholders."""
    labels = " ".join(
        f"{label} {{{{ $labels.{label} }}}}" for label in rule.condition.labels if label not in RUN_LABELS
    )
    text = rule.summary.replace("{labels}", labels)
    text = re.sub(r"\{value:\.\d%\}", "{{ $value | humanizePercentage }}", text)
    text = re.sub(r"\{value:(\.\d[fg])\}", r'{{ printf "%\1" $value }}', text)
    return f"run {{{{ $labels.run }}}}: {text}"


def _scrape_configuration(runs: Path, token_file: Path | None, targets_url: str | None) -> dict[str, Any]:
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
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": ["wanma-rules.yml"],
        "scrape_configs": [scrape],
    }


def _alerting(url: str | None) -> dict[str, Any]:
    if url is None:
        return {}
    address = urlsplit(url)
    manager = {
        "scheme": address.scheme,
        "path_prefix": address.path or "/",
        "static_configs": [{"targets": [address.netloc]}],
    }
    return {"alerting": {"alertmanagers": [manager]}}


def _json(value: Any) -> str:
    """Return a value as JSON, which is YAML, too."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
