"""Grafana dashboards: one of all runs, one of a run, as Grafana's JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from wanma.observe.series.catalogue import CATALOGUE, FORECAST_PREFIX, RANK_LABELS, RUN_LABELS

DATA_SOURCE = {"type": "prometheus", "uid": "wanma"}
SCHEMA_VERSION = 39
"""Version of Grafana's dashboard JSON (Grafana 10.4 and later migrate it)."""
_COLUMNS = 24
"""Columns of Grafana's grid."""
_SIZES = {"stat": (4, 4), "timeseries": (8, 8), "table": (12, 8), "status-history": (12, 8)}
"""Width and height of a panel in the grid by its kind."""
Panel = dict[str, Any]
Rows = Mapping[str, tuple[Panel, ...]]
_CHOSEN = {label: f"${label}" for label in RUN_LABELS}
"""Labels of the run that the variables of a dashboard choose."""
_SAME_RUN = f"on ({', '.join(RUN_LABELS)})"


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards as Grafana reads them, by their uid."""
    runs = CATALOGUE["run_info"].full_name
    variables = [_variable("job", runs), _variable("run", f'{runs}{{job="$job"}}')]
    fleet = _dashboard("wanma-fleet", "wanma: all runs", _FLEET, [], 'run!=""')
    run = _dashboard("wanma-run", "wanma: a run", _RUN, variables, 'job="$job",run="$run"')
    return {"wanma-fleet": fleet, "wanma-run": run}


def _variable(label: str, series: str) -> dict[str, Any]:
    """Return the variable of a dashboard with the values of a label."""
    return {
        "name": label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": f"label_values({series}, {label})", "refId": label},
        "refresh": 2,
        "sort": 1,
    }


def _dashboard(uid: str, title: str, rows: Rows, variables: list[Any], matcher: str) -> dict[str, Any]:
    panels: list[Panel] = []
    top = 0
    for name, row in rows.items():
        position = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        panels.append({"type": "row", "title": name, "panels": [], "collapsed": False, "gridPos": position})
        left, top = 0, top + 1
        for panel in row:
            width, height = _SIZES[panel["type"]]
            if left + width > _COLUMNS:
                left, top = 0, top + height
            panels.append({**panel, "gridPos": {"x": left, "y": top, "w": width, "h": height}})
            left += width
        top += height
    alerts = {
        "name": "alerts",
        "enable": True,
        "datasource": DATA_SOURCE,
        "expr": f'ALERTS{{alertstate="firing",{matcher}}}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }
    return {
        "uid": uid,
        "title": title,
        "tags": ["wanma"],
        "schemaVersion": SCHEMA_VERSION,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "annotations": {"list": [alerts]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _panel(
    title: str,
    queries: str | Mapping[str, str],
    unit: str = "short",
    kind: str = "timeseries",
    *,
    is_stacked: bool = False,
    description: str = "",
) -> Panel:
    """Return a panel without its place.

    Args:
        queries: PromQL, or the name of a metric of the chosen run, by legend; without one the title is it.
        unit: unit by Grafana's identifier.
        kind: type of the panel by Grafana's identifier.
    """
    named = {title: queries} if isinstance(queries, str) else queries
    is_table = kind == "table"
    defaults: dict[str, Any] = {"unit": unit, "custom": {}}
    if is_stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    if kind == "status-history":
        defaults["color"] = {"mode": "continuous-BlYlRd"}
    return {
        "title": title,
        "description": description,
        "type": kind,
        "datasource": DATA_SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATA_SOURCE,
                "expr": _run(query) if query in CATALOGUE else query,
                "legendFormat": legend,
                "instant": is_table,
                "range": not is_table,
                **({"format": "table"} if is_table else {}),
            }
            for index, (legend, query) in enumerate(named.items())
        ],
        **({"transformations": [{"id": "merge", "options": {}}]} if is_table else {}),
    }


def _all(metric: str, function: str = "", window: str = "$__rate_interval") -> str:
    """Return a metric of all runs, or a function of it in a window."""
    return CATALOGUE[metric].promql(function, window)


def _run(metric: str, function: str = "", **labels: str) -> str:
    """Return a metric of the chosen run, or a function of it."""
    return CATALOGUE[metric].promql(function, "$__rate_interval", **_CHOSEN, **labels)


_rate = partial(_run, function="rate")


def _per_step(metric: str, **labels: str) -> str:
    """Return the part of a counter of seconds in the time of a mean step."""
    return f"{_rate(metric, **labels)} / {_SAME_RUN} group_left () {_rate('steps')}"


def _beside_forecast(metric: str, measured: str = "") -> dict[str, str]:
    """Return the queries of a metric, or of what is measured of it, and of its forecast, by legend."""
    return {"measured": measured or metric, "forecast": f"{FORECAST_PREFIX}{metric}"}


def _rank_work(phase: str) -> str:
    per_rank = _rate("rank_phase_seconds", phase=phase)
    return f"{per_rank} / on ({', '.join(RANK_LABELS)}) {_rate('rank_steps')}"


_CPUS = f"{_all('node_cpu_seconds', 'rate')} / {_all('node_cpus')}"
_MEMORY = f"1 - {_all('node_memory_available_bytes')} / {_all('node_memory_bytes')}"
_GOODPUT = f"sum({_all('used_device_seconds')}) / sum({_all('device_seconds')})"
_CHECKPOINT_AGE = f"{_run('completed_steps')} - {_SAME_RUN} {_run('checkpoint_step')}"
_WHOLE = "measured so far; the forecast is of the whole run"
_SILENCE = "seconds since the last report of progress"
_COUNTED = "device time of steps that count over device time allocated"
_NODE, _RANK, _GPU = "{{run}} {{node}}", "rank {{rank}}", "{{node}}/{{gpu}}"

_FLEET: Rows = {
    "Now": (
        _panel("runs", f"count({_all('up')} > 0)", kind="stat"),
        _panel("ranks", f"sum({_all('rank_up')})", kind="stat"),
        _panel("goodput", _GOODPUT, "percentunit", "stat", description=_COUNTED),
        _panel("GPU utilization", f"avg({_all('gpu_utilization_ratio')})", "percentunit", "stat"),
        _panel("GPU power", f"sum({_all('gpu_power_watts')})", "watt", "stat"),
        _panel("recoveries in an hour", f"sum({_all('recoveries', 'increase', '1h')})", kind="stat"),
    ),
    "Runs": (
        _panel(
            "runs",
            {name: _all(name) for name in ("run_info", "completed_steps", "loss", "goodput_ratio")},
            kind="table",
        ),
        _panel("Alerts", {"{{alertname}} {{run}}": 'ALERTS{alertstate="firing",run!=""}'}, kind="table"),
    ),
    "Over time": (
        _panel("loss", {"{{run}}": _all("loss")}),
        _panel("throughput (targets/s)", {"{{run}}": _all("targets_per_second")}),
        _panel("MFU", {"{{run}}": _all("mfu_ratio")}, "percentunit"),
        _panel("goodput", {"{{run}}": _all("goodput_ratio")}, "percentunit"),
        _panel("processors in use", {_NODE: _CPUS}, "percentunit"),
        _panel("memory in use", {_NODE: _MEMORY}, "percentunit"),
    ),
}

_RUN: Rows = {
    "Now": (
        _panel("steps", "completed_steps", kind="stat"),
        _panel("loss", "loss", kind="stat"),
        _panel("targets/s", "targets_per_second", kind="stat"),
        _panel("MFU", "mfu_ratio", "percentunit", "stat"),
        _panel("goodput", "goodput_ratio", "percentunit", "stat"),
        _panel("ranks alive", f"sum({_run('rank_up')})", kind="stat"),
    ),
    "Training": (
        _panel("loss", {"training": "loss", "validation": "validation_loss"}),
        _panel("gradient norm", "gradient_norm"),
        _panel("learning rate", "learning_rate"),
        _panel("validation metrics", {"{{metric}}": "validation_metric"}),
        _panel("expert load, maximum over mean", "expert_load_imbalance"),
        _panel("gradient norm by layer", {"{{layer}}": "layer_gradient_norm"}),
    ),
    "Step": (
        _panel(
            "step, beside its forecast",
            {
                **_beside_forecast("step_seconds", _per_step("step_time_seconds")),
                "upper end of the forecast": "forecast_step_upper_seconds",
            },
            "s",
        ),
        _panel("step by phase (rank 0)", {"{{phase}}": _per_step("phase_seconds")}, "s", is_stacked=True),
        _panel("forecast by phase", {"{{phase}}": "forecast_phase_seconds"}, "s", is_stacked=True),
        _panel(
            "exposed communication",
            {
                "{{kind}}": _per_step("exposed_communication_seconds"),
                "{{kind}}, forecast": "forecast_exposed_communication_seconds",
            },
            "s",
        ),
        _panel("bubble", _beside_forecast("bubble_seconds", _per_step("bubble_seconds")), "s"),
        _panel("throughput (targets/s)", _beside_forecast("targets_per_second")),
        _panel("MFU", _beside_forecast("mfu_ratio"), "percentunit"),
        _panel("goodput", _beside_forecast("goodput_ratio"), "percentunit", description=_COUNTED),
        _panel("peak memory of rank 0", _beside_forecast("memory_bytes"), "bytes"),
        _panel("time of the run", _beside_forecast("run_seconds"), "s", description=_WHOLE),
    ),
    "Data": (
        _panel(
            "loader threads by part (rank 0)", {"{{part}}": _per_step("load_seconds")}, "s", is_stacked=True
        ),
        _panel(
            "wait for data (rank 0)",
            {
                "measured": _per_step("phase_seconds", phase="data"),
                "forecast": _run("forecast_phase_seconds", phase="data"),
            },
            "s",
        ),
        _panel("bad samples", "bad_samples"),
    ),
    "Ranks": (
        _panel("work of a step by rank: computation", {_RANK: _rank_work("compute")}, "s", "status-history"),
        _panel(
            "work of a step by rank: waiting for data", {_RANK: _rank_work("data")}, "s", "status-history"
        ),
        _panel(
            "memory by rank",
            {_RANK: "rank_memory_bytes", "forecast of the fullest": "forecast_rank_memory_bytes"},
            "bytes",
        ),
        _panel("processor time by rank", {_RANK: _rate("rank_cpu_seconds")}, "percentunit"),
        _panel("silence", {_RANK: "rank_silent_seconds"}, "s", description=_SILENCE),
    ),
    "Nodes": (
        _panel("network received", {"{{node}} {{interface}}": _rate("node_network_received_bytes")}, "Bps"),
        _panel("network sent", {"{{node}} {{interface}}": _rate("node_network_sent_bytes")}, "Bps"),
        _panel(
            "disks",
            {
                "{{node}} read": _rate("node_disk_read_bytes"),
                "{{node}} written": _rate("node_disk_written_bytes"),
            },
            "Bps",
        ),
        _panel("free space", {"{{node}}": "node_disk_free_bytes"}, "bytes"),
        _panel("memory available", {"{{node}}": "node_memory_available_bytes"}, "bytes"),
    ),
    "GPUs": (
        _panel("power by GPU", {_GPU: "gpu_power_watts"}, "watt", "status-history"),
        _panel("throttled by GPU", {_GPU: "gpu_throttled"}, kind="status-history"),
        _panel("GPU utilization", {_GPU: "gpu_utilization_ratio"}, "percentunit"),
        _panel(
            "GPU memory",
            {
                _GPU: "gpu_memory_used_bytes",
                f"{_GPU} without PyTorch's cache": "gpu_memory_needed_bytes",
                "forecast of the fullest": "forecast_gpu_memory_used_bytes",
            },
            "bytes",
        ),
        _panel("allocation retries by rank, per second", {_RANK: _rate("rank_allocation_retries")}),
        _panel("GPU temperature", {_GPU: "gpu_temperature_celsius"}, "celsius"),
        _panel("GPU clock", {_GPU: "gpu_sm_clock_hertz"}, "hertz"),
        _panel(
            "power",
            {
                "GPUs": f"sum({_run('gpu_power_watts')})",
                "nodes at the wall, forecast": "forecast_power_watts",
            },
            "watt",
        ),
    ),
    "Survival": (
        _panel("steps since the newest checkpoint", _CHECKPOINT_AGE),
        _panel(
            "checkpoints",
            {
                "write": "checkpoint_write_seconds",
                "write, forecast": "forecast_checkpoint_write_seconds",
                "stall, per second": _rate("checkpoint_stall_seconds"),
                "stall of one, forecast": "forecast_checkpoint_stall_seconds",
            },
            "s",
        ),
        _panel("size of a checkpoint", _beside_forecast("checkpoint_bytes"), "bytes"),
        _panel("recoveries and starts", {"recoveries": "recoveries", "starts": "starts"}),
    ),
}
