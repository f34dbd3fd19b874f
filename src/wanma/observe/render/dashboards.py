"""Grafana dashboards: one of all runs, one of a run, as data and as Grafana's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from wanma.observe.series.catalogue import CATALOGUE

PanelKind = Literal["timeseries", "stat", "table", "status-history"]
DATA_SOURCE = {"type": "prometheus", "uid": "wanma"}
SCHEMA_VERSION = 39
"""Version of Grafana's dashboard JSON (Grafana 10.4 and later migrate it)."""
_COLUMNS = 24
"""Columns of Grafana's grid."""
_RANGE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """Query of a panel, in PromQL."""

    expression: str
    legend: str = ""
    """Name of a series; `{{label}}` is its label."""


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    """Unit by Grafana's identifier."""
    kind: PanelKind = "timeseries"
    width: int = 8
    """Columns of 24."""
    is_stacked: bool = False
    description: str = ""


@dataclass(frozen=True)
class Dashboard:
    """Dashboard with rows of panels, by title."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    has_run: bool
    """True if a run is chosen at its top, as `$run`."""

    def queries(self) -> list[str]:
        """Return all queries."""
        return [query.expression for _, panels in self.rows for panel in panels for query in panel.queries]

    def to_json(self) -> dict[str, Any]:
        """Return the dashboard as Grafana reads it."""
        panels: list[dict[str, Any]] = []
        top = 0
        for title, row in self.rows:
            panels.append(
                {
                    "type": "row",
                    "title": title,
                    "id": len(panels) + 1,
                    "panels": [],
                    "collapsed": False,
                    "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
                }
            )
            top, left = top + 1, 0
            for panel in row:
                height = 4 if panel.kind == "stat" else 8
                if left + panel.width > _COLUMNS:
                    top, left = top + height, 0
                position = {"x": left, "y": top, "w": panel.width, "h": height}
                panels.append(_panel(panel, len(panels) + 1, position))
                left += panel.width
            top += 4 if row[-1].kind == "stat" else 8
        variables = [_run_variable()] if self.has_run else []
        return {
            "uid": self.uid,
            "title": self.title,
            "tags": ["wanma"],
            "schemaVersion": SCHEMA_VERSION,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {"list": variables},
            "annotations": {"list": [_alert_annotation(self.has_run)]},
            "panels": panels,
        }


def _name(metric: str) -> str:
    return CATALOGUE[metric].full_name


def _merged(metric: str, expression: str) -> str:
    """Return the expression with one series for all targets of a run: of its nodes and of its starts."""
    return f"max by ({', '.join(CATALOGUE[metric].labels)}) ({expression})"


def _of_all(metric: str, function: str = "", window: str = _RANGE) -> str:
    """Return a metric of all runs, or a function of it in a window."""
    return _merged(metric, f"{function}({_name(metric)}[{window}])" if function else _name(metric))


def _of_run(metric: str) -> str:
    return _merged(metric, f'{_name(metric)}{{run="$run"}}')


def _rate(metric: str, **labels: str) -> str:
    matchers = ",".join(['run="$run"', *(f'{name}="{text}"' for name, text in labels.items())])
    return _merged(metric, f"rate({_name(metric)}{{{matchers}}}[{_RANGE}])")


def _per_step(metric: str) -> str:
    """Return the part of a counter of seconds in the time of a mean step."""
    return f"{_rate(metric)} / on (run) group_left () {_rate('steps')}"


def _shown(metric: str, title: str = "", legend: str = "", unit: str = "short", **more: Any) -> Panel:
    return Panel(title or CATALOGUE[metric].meaning, (Query(_of_run(metric), legend or title),), unit, **more)


_ALERTS = Panel(
    "Alerts", (Query('ALERTS{alertstate="firing"}', "{{alertname}} {{run}}"),), kind="table", width=12
)

FLEET = Dashboard(
    "wanma-fleet",
    "wanma: all runs",
    (
        (
            "Now",
            (
                Panel("runs", (Query(f"count({_of_all('up')} > 0)", "runs"),), kind="stat", width=4),
                Panel("ranks", (Query(f"sum({_of_all('rank_up')})", "ranks"),), kind="stat", width=4),
                Panel(
                    "goodput",
                    (
                        Query(
                            f"sum({_of_all('used_device_seconds')}) / sum({_of_all('device_seconds')})",
                            "goodput",
                        ),
                    ),
                    "percentunit",
                    "stat",
                    4,
                    description="device time of steps that count over device time allocated",
                ),
                Panel(
                    "GPU utilization",
                    (Query(f"avg({_of_all('gpu_utilization_ratio')})", "GPUs"),),
                    "percentunit",
                    "stat",
                    4,
                ),
                Panel("GPU power", (Query(f"sum({_of_all('gpu_power_watts')})", "GPUs"),), "watt", "stat", 4),
                Panel(
                    "recoveries in an hour",
                    (Query(f"sum({_of_all('recoveries', 'increase', '1h')})", "recoveries"),),
                    kind="stat",
                    width=4,
                ),
            ),
        ),
        (
            "Runs",
            (
                Panel(
                    "runs",
                    (
                        Query(_of_all("run_info"), "{{run}}"),
                        Query(_of_all("completed_steps"), "steps"),
                        Query(_of_all("loss"), "loss"),
                        Query(_of_all("goodput_ratio"), "goodput"),
                    ),
                    kind="table",
                    width=12,
                ),
                _ALERTS,
            ),
        ),
        (
            "Over time",
            (
                Panel("loss", (Query(_of_all("loss"), "{{run}}"),)),
                Panel("throughput (targets/s)", (Query(_of_all("targets_per_second"), "{{run}}"),)),
                Panel("MFU", (Query(_of_all("mfu_ratio"), "{{run}}"),), "percentunit"),
                Panel("goodput", (Query(_of_all("goodput_ratio"), "{{run}}"),), "percentunit"),
                Panel(
                    "processors in use",
                    (
                        Query(
                            f"{_of_all('node_cpu_seconds', 'rate')} / {_of_all('node_cpus')}",
                            "{{run}} {{node}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "memory in use",
                    (
                        Query(
                            f"1 - {_of_all('node_memory_available_bytes')} / {_of_all('node_memory_bytes')}",
                            "{{run}} {{node}}",
                        ),
                    ),
                    "percentunit",
                ),
            ),
        ),
    ),
    has_run=False,
)

RUN = Dashboard(
    "wanma-run",
    "wanma: a run",
    (
        (
            "Now",
            (
                _shown("completed_steps", "steps", kind="stat", width=4),
                _shown("loss", "loss", kind="stat", width=4),
                _shown("targets_per_second", "targets/s", kind="stat", width=4),
                _shown("mfu_ratio", "MFU", unit="percentunit", kind="stat", width=4),
                _shown("goodput_ratio", "goodput", unit="percentunit", kind="stat", width=4),
                Panel("ranks alive", (Query(f"sum({_of_run('rank_up')})", "ranks"),), kind="stat", width=4),
            ),
        ),
        (
            "Training",
            (
                Panel(
                    "loss",
                    (Query(_of_run("loss"), "training"), Query(_of_run("validation_loss"), "validation")),
                ),
                _shown("gradient_norm", "gradient norm"),
                _shown("learning_rate", "learning rate"),
                _shown("validation_metric", "validation metrics", "{{metric}}"),
                _shown("expert_load_imbalance", "expert load, maximum over mean"),
                _shown("layer_gradient_norm", "gradient norm by layer", "{{layer}}"),
            ),
        ),
        (
            "Step",
            (
                Panel(
                    "step, beside its forecast",
                    (
                        Query(_per_step("step_time_seconds"), "measured"),
                        Query(_of_run("forecast_step_seconds"), "forecast"),
                        Query(_of_run("forecast_step_upper_seconds"), "upper end of the forecast"),
                    ),
                    "s",
                ),
                Panel(
                    "step by phase (rank 0)",
                    (Query(_per_step("phase_seconds"), "{{phase}}"),),
                    "s",
                    is_stacked=True,
                ),
                Panel(
                    "forecast by kind",
                    (Query(_of_run("forecast_phase_seconds"), "{{phase}}"),),
                    "s",
                    is_stacked=True,
                ),
                Panel(
                    "exposed communication",
                    (Query(_per_step("exposed_communication_seconds"), "{{kind}}"),),
                    "s",
                    is_stacked=True,
                ),
                _shown("targets_per_second", "throughput (targets/s)"),
                _shown("mfu_ratio", "MFU", unit="percentunit"),
            ),
        ),
        (
            "Ranks",
            (
                Panel(
                    "work of a step by rank: computation",
                    (
                        Query(
                            f"{_rate('rank_phase_seconds', phase='compute')} / on (run, node, rank) "
                            f"{_rate('rank_steps')}",
                            "rank {{rank}}",
                        ),
                    ),
                    "s",
                    "status-history",
                    12,
                    description="heat map of ranks over time; a straggler is the row that differs",
                ),
                Panel(
                    "work of a step by rank: waiting for data",
                    (
                        Query(
                            f"{_rate('rank_phase_seconds', phase='data')} / on (run, node, rank) "
                            f"{_rate('rank_steps')}",
                            "rank {{rank}}",
                        ),
                    ),
                    "s",
                    "status-history",
                    12,
                ),
                Panel("memory by rank", (Query(_of_run("rank_memory_bytes"), "rank {{rank}}"),), "bytes"),
                Panel(
                    "processor time by rank",
                    (Query(_rate("rank_cpu_seconds"), "rank {{rank}}"),),
                    "percentunit",
                ),
                Panel(
                    "silence",
                    (Query(_of_run("rank_silent_seconds"), "rank {{rank}}"),),
                    "s",
                    description="seconds since the last report of progress",
                ),
            ),
        ),
        (
            "Nodes",
            (
                Panel(
                    "network received",
                    (Query(_rate("node_network_received_bytes"), "{{node}} {{interface}}"),),
                    "Bps",
                ),
                Panel(
                    "network sent",
                    (Query(_rate("node_network_sent_bytes"), "{{node}} {{interface}}"),),
                    "Bps",
                ),
                Panel(
                    "disks",
                    (
                        Query(_rate("node_disk_read_bytes"), "{{node}} read"),
                        Query(_rate("node_disk_written_bytes"), "{{node}} written"),
                    ),
                    "Bps",
                ),
                Panel(
                    "GPU utilization",
                    (Query(_of_run("gpu_utilization_ratio"), "{{node}}/{{gpu}}"),),
                    "percentunit",
                ),
                Panel("GPU memory", (Query(_of_run("gpu_memory_used_bytes"), "{{node}}/{{gpu}}"),), "bytes"),
                Panel("GPU power", (Query(_of_run("gpu_power_watts"), "{{node}}/{{gpu}}"),), "watt"),
                Panel(
                    "GPU temperature",
                    (Query(_of_run("gpu_temperature_celsius"), "{{node}}/{{gpu}}"),),
                    "celsius",
                ),
                Panel("free space", (Query(_of_run("node_disk_free_bytes"), "{{node}}"),), "bytes"),
                Panel(
                    "memory available", (Query(_of_run("node_memory_available_bytes"), "{{node}}"),), "bytes"
                ),
            ),
        ),
        (
            "Survival",
            (
                Panel(
                    "steps since the newest checkpoint",
                    (
                        Query(
                            f"{_of_run('completed_steps')} - on (run) {_of_run('checkpoint_step')}", "steps"
                        ),
                    ),
                ),
                Panel(
                    "checkpoints",
                    (
                        Query(_of_run("checkpoint_write_seconds"), "write"),
                        Query(_rate("checkpoint_stall_seconds"), "stall, per second"),
                    ),
                    "s",
                ),
                Panel(
                    "recoveries and starts",
                    (Query(_of_run("recoveries"), "recoveries"), Query(_of_run("starts"), "starts")),
                ),
            ),
        ),
    ),
    has_run=True,
)

DASHBOARDS: Sequence[Dashboard] = (FLEET, RUN)


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries" and panel.is_stacked:
        custom = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": custom}
    if panel.kind == "status-history":
        defaults["color"] = {"mode": "continuous-BlYlRd"}
    is_instant = panel.kind == "table"
    return {
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind,
        "datasource": DATA_SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
                "instant": is_instant,
                "range": not is_instant,
                **({"format": "table"} if is_instant else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        **({"transformations": [{"id": "merge", "options": {}}]} if is_instant else {}),
    }


def _run_variable() -> dict[str, Any]:
    query = f"label_values({_name('run_info')}, run)"
    return {
        "name": "run",
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": "run"},
        "refresh": 2,
        "sort": 1,
    }


def _alert_annotation(has_run: bool) -> dict[str, Any]:
    matcher = ',run="$run"' if has_run else ""
    return {
        "name": "alerts",
        "enable": True,
        "datasource": DATA_SOURCE,
        "expr": f'ALERTS{{alertstate="firing"{matcher}}}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }
